# SPDX-License-Identifier: Apache-2.0
"""A node as the tools see it: its agent's directories, and its pinned maps.

A command may run where these cannot be seen, as in another mount namespace.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ebpflb.errors import NodeError
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.layout import HANDED
from ebpflb.kernel.maps.state_dir import StateDir, read_record, why_unseen
from ebpflb.kernel.node import namespaces
from ebpflb.options import Paths


def paths(state: Path, run: Path | None, cache: Path = Paths.cache) -> Paths:
    """Return the directories of one node's agent, as absolute paths.

    Without ``run``, the run directory is the one recorded in the state directory.
    """
    state, cache = state.absolute(), cache.absolute()
    found = read_record(state, cache) or Paths(state, cache=cache)
    return found if run is None else replace(found, run=run.absolute())


@contextmanager
def pinned_maps(state: Path) -> Iterator[dict[str, Map]]:
    """Open the pinned maps, by name. Raises NodeError if there are none."""
    maps = StateDir(state.absolute()).read_maps()
    try:
        yield maps
    finally:
        for opened in maps.values():
            opened.close()


@contextmanager
def handed_maps(state: Path) -> Iterator[dict[str, Map]]:
    """Open the pinned maps of hand-overs; none without --hand-over."""
    found: dict[str, Map] = {}
    with suppress(NodeError):
        found = StateDir(state.absolute()).read_maps(HANDED)
    try:
        yield found
    finally:
        for opened in found.values():
            opened.close()


@contextmanager
def maps_if_any(state_dir: Path) -> Iterator[dict[str, Map] | None]:
    """Open the pinned maps; None if there are none of this version. An agent may still answer."""
    with ExitStack() as stack:
        try:
            maps = stack.enter_context(pinned_maps(state_dir))
        except NodeError:
            yield None
        else:
            yield maps


# Whether a command runs where it can see its node.


def require_state_directory(path: Path) -> None:
    """Raise NodeError that names the remedy if the state directory cannot be seen."""
    if unseen := why_unseen(path):
        raise NodeError(unseen)


def why_elsewhere(maps: Mapping[str, Map]) -> str:
    """Return a sentence with the remedy if the agent of these maps serves another network
    namespace.

    Return "" if it serves this one, or if the kernel does not tell (before 5.14).
    """
    served, here = maps["settings"].get(0).host_netns, namespaces.own_cookie()
    if not served or here in (None, served):
        return ""
    path = namespaces.by_cookie(served) or "PATH"
    return (
        "this is not the network namespace that the agent serves: run"
        f" `nsenter --net={path} ebpflb ...` instead"
    )


def require_namespace(maps: Mapping[str, Map]) -> None:
    """Raise NodeError if ``why_elsewhere`` returns a reason."""
    if elsewhere := why_elsewhere(maps):
        raise NodeError(elsewhere)


def node_namespace(maps: Mapping[str, Map]) -> Path:
    """Return the network namespace that the agent of these maps serves; this process's own if the
    kernel does not tell (before 5.14).

    Raises NodeError if it is gone, or cannot be found from here.
    """
    served = maps["settings"].get(0).host_netns
    path = namespaces.by_cookie(served) if served else namespaces.OWN_NETNS
    if path is None and namespaces.cookie(namespaces.OWN_NETNS) is not None:
        raise NodeError(
            "the node's network namespace is gone, or cannot be found from here: run the command in"
            " it (nsenter --net)"
        )
    return path or namespaces.OWN_NETNS
