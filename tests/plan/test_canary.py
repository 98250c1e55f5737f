# SPDX-License-Identifier: Apache-2.0
"""Doctor's canary among the service ports: it takes nothing from any Service."""

from dataclasses import replace
from ipaddress import ip_network

from ebpflb.entries.services import Frontend
from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.plan.canary import CANARY_IPS, CANARY_PORT, CLIENTS, is_canary, service_ports
from ebpflb.plan.planner import Planner


def test_every_frontend_is_restricted() -> None:
    """All frontends are restricted, so the client's sockets use the packet path. The NodePort
    admits only the client.
    """
    ports = service_ports(30999)
    assert len(ports) == 4 and all(map(is_canary, ports))
    for desired in ports.values():
        assert all("restricted" in flags for flags in desired.frontends.values())
        client = CLIENTS[desired.name.family]
        assert desired.nodeport_source_ranges == (ip_network(client),)
    assert all(len(each.frontends) == 1 for each in service_ports(0).values())


def test_a_service_wins() -> None:
    """A Service gets its frontends whichever comes first; the canary gets the rest."""
    name, desired = next(iter(service_ports(30999).items()))
    real = replace(desired, name=name._replace(namespace="default"), created="2026-01-01T00:00:00Z")
    for order in ([desired, real], [real, desired]):
        planner = Planner(CAPACITY)
        for each in order:
            planner.plan_changes({each.name: each}, 0.0)
        assert set(planner.frontends.owners.values()) == {real.name}
        planner.plan_changes({real.name: None}, 1.0)
        assert planner.frontends.owners[Frontend(CANARY_IPS[name.family], CANARY_PORT, 6)] == name


def test_it_changes_no_cluster_ips() -> None:
    """The prefix of all cluster IPs stays as it is, because unused addresses in it are refused."""
    planner = Planner(CAPACITY)
    planner.plan_changes(service_ports(30999), 0.0)
    own = {Frontend(ip, CANARY_PORT, 17) for ip in CANARY_IPS.values()}
    assert own <= planner.frontends.owners.keys()
    assert not planner.cluster_ips.prefixes.networks and not planner.cluster_ips.counts
