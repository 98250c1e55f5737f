# SPDX-License-Identifier: Apache-2.0
"""Whether a command runs where it can see what it is asked about: the state directory, and the
network namespace of its agent.
"""

from collections.abc import Mapping
from pathlib import Path

from ebpflb.errors import NodeError
from ebpflb.kernel.attach import netns_cookie
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import why_unseen
from ebpflb.kernel.node import clients


def require_state_directory(path: Path) -> None:
    """Raises NodeError that names what helps."""
    if unseen := why_unseen(path):
        raise NodeError(unseen)


def why_elsewhere(maps: Mapping[str, Map]) -> str:
    """That this is not the network namespace which the agent of these maps serves, and what helps,
    in one sentence. "" if it is, and where the kernel does not tell (before 5.14).
    """
    served, here = maps["settings"].get(0).host_netns, netns_cookie.by_socket()
    if not served or here in (None, served):
        return ""
    path = clients.by_cookie(served) or "PATH"
    return (
        "this is not the network namespace that the agent serves: run"
        f" `nsenter --net={path} ebpflb ...` instead"
    )


def require_namespace(maps: Mapping[str, Map]) -> None:
    """Raises NodeError where ``why_elsewhere`` has a reason."""
    if elsewhere := why_elsewhere(maps):
        raise NodeError(elsewhere)
