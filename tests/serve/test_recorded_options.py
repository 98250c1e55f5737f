# SPDX-License-Identifier: Apache-2.0
"""The options in an agent's status are those by which others list and plan the same objects."""

from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from ebpflb.model import services
from ebpflb.model.annotations import MAGLEV
from ebpflb.options import REPORT, ConntrackOptions, Options, Paths
from ebpflb.serve.recorded_options import read_recorded, record

PATHS = Paths(Path("/sys/fs/bpf/ebpflb-none"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("masquerade_ports", "0-9"),
        ("masquerade_ports", "9-8"),
        ("masquerade_ports", f"9-{1 << 16}"),
        ("namespace_share", "150"),
        ("scheduler", "none"),
        ("audit", "none"),
        ("cgroup", "a\0b"),
        ("api_servers", "192.0.2.1"),
        ("local_api_server", "192.0.2.1:7445"),
    ],
)
def test_texts_that_no_agent_has_recorded(name: str, text: str) -> None:
    """A file may have anything."""
    with pytest.raises(ValueError, match=r"is not|null character"):
        read_recorded({name: text}, PATHS)


def test_the_same_services_are_planned() -> None:
    """By every option that decides which, and how."""
    chosen = Options(
        paths=PATHS,
        node_name="node-1",
        cgroup=Path("/sys/fs/cgroup"),
        kubeconfig=Path("/etc/kubeconfig"),
        master="https://192.0.2.1:6443",
        api_servers=("https://192.0.2.1:6443", "https://[2001:db8::1]:6443"),
        local_api_server=(ip_address("127.0.0.1"), 7445),
        bind_address=ip_address("2001:db8::1"),
        serve_external_ips=False,
        external_ips=services.parse_external_ips("192.0.2.0/24"),
        nodeport_source_ranges=(ip_network("198.51.100.0/24"),),
        namespaces=frozenset({"a", "b"}),
        services=services.parse_requirements("app in (x,y),!z"),
        masquerade_mark=0x100,
        masquerade_ports=(2000, 3000),
        scheduler=MAGLEV,
        namespace_share=0.5,
        audit=REPORT,
        conntrack=ConntrackOptions(be_liberal=True),
    )
    found = read_recorded(record(chosen), PATHS)
    assert found == chosen
    assert found.admission == chosen.admission
