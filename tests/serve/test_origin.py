# SPDX-License-Identifier: Apache-2.0
"""What an agent tells of its options is what others list and plan the same objects by."""

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebpflb.model import services
from ebpflb.options import ConntrackOptions, Options, Paths
from ebpflb.serve.status import Origin, make_origin

PATHS = Paths(Path("/sys/fs/bpf/ebpflb-none"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"masquerade_mark": 0},
        {"masquerade_mark": 1 << 32},
        {"masquerade_ports": (0, 9)},
        {"masquerade_ports": (9, 8)},
        {"masquerade_ports": (9, 1 << 16)},
        {"scheduler": "none"},
    ],
)
def test_what_no_agent_has_told(wrong: dict[str, Any]) -> None:
    """A file may have anything."""
    with pytest.raises(ValueError, match=r"is no|are no"):
        Origin("node-1", "/cgroup", **wrong).options(PATHS)


def test_the_same_services_are_planned() -> None:
    """By every option that decides which, and how."""
    chosen = Options(
        paths=PATHS,
        node_name="node-1",
        cgroup=Path("/sys/fs/cgroup"),
        kubeconfig=Path("/etc/kubeconfig"),
        master="https://192.0.2.1:6443",
        bind_address=ip_address("2001:db8::1"),
        serve_external_ips=False,
        external_ips=services.parse_external_ips("192.0.2.0/24"),
        nodeport_source_ranges=(ip_network("198.51.100.0/24"),),
        namespaces=frozenset({"a", "b"}),
        services=services.parse_requirements("app in (x,y),!z"),
        masquerade_mark=0x100,
        masquerade_ports=(2000, 3000),
        conntrack=ConntrackOptions(be_liberal=True),
    )
    told = msgspec.json.decode(msgspec.json.encode(make_origin(chosen)), type=Origin)
    assert told.options(PATHS) == chosen
    assert chosen.admission == told.options(PATHS).admission
