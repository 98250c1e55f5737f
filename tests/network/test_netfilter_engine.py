# SPDX-License-Identifier: Apache-2.0
"""Properties of translation by nftables rules: netfilter sees the original destination, knows every
flow, and chooses ports as for any other rule.
"""

import pytest

from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.model.packet_path import Engine
from tests.kit import requests
from tests.kit.firewall import chain, rules
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families, netfilter, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

FRONTENDS = Frontends(10)
A_MOMENT = 0.3  # seconds in which nothing may happen

pytestmark = netfilter


@pytest.fixture(autouse=True)
def service(two: TwoNodes) -> None:
    """Publish an endpoint on each node; no flow of a former test is left."""
    two.publish(two.service("web", 10, two.here, two.there))
    for table in FLOW_MAPS:
        two.delete_flows(table)


def answered(two: TwoNodes, send: Send, *, v6: bool, times: int = 8) -> set[tuple[str, str]]:
    """Return who answered the client outside at near's NodePort, and which client it saw."""
    client, where = two.sockets(two.outside), FRONTENDS.to("nodeport", two.near, v6=v6)
    found = (send(client, *where) for _ in range(times))
    return {(answer.name, answer.source) for answer in found}


def is_lost(two: TwoNodes, send: Send, *, v6: bool) -> bool:
    """Whether neither an answer nor an error comes."""
    where = FRONTENDS.to("nodeport", two.near, v6=v6)
    return not requests.is_answered(send, two.sockets(two.outside), where, A_MOMENT)


@families
@protocols
def test_pods_whose_route_a_mark_of_prerouting_chooses(two: TwoNodes, v6: bool, send: Send) -> None:
    """As with the AWS VPC CNI, packets to a local address are marked; because of the mark, answers
    use the main table, which pods' own packets do not use.
    """
    two.publish(two.service("web", 10, two.here, externalTrafficPolicy="Local"))
    pod = two.here.v6 if v6 else two.here.v4
    mark = chain(
        "prerouting",
        "mangle",
        'iifname "eth0" fib daddr type local ct mark set ct mark or 0x80',
        'iifname != "eth0" meta mark set ct mark',
    )
    two.near.ip(
        "rule add priority 100 fwmark 0x80/0x80 lookup main",
        f"rule add priority 200 from {pod} lookup 77",
        "route add blackhole default table 77",
        v6=v6,
    )
    try:
        with rules(two.near, mark):
            assert answered(two, send, v6=v6) == {
                ("here", two.outside.v6 if v6 else two.outside.v4)
            }
        assert is_lost(two, send, v6=v6)
    finally:
        two.near.ip("rule del priority 100", "rule del priority 200", "route flush table 77", v6=v6)


@families
@protocols
def test_what_a_cni_masquerades(two: TwoNodes, v6: bool, send: Send) -> None:
    """If the endpoint is outside the pods' ranges, such as the API server, the CNI's rule in
    POSTROUTING applies: our rule masquerades only marked packets.
    """
    two.publish(two.service("web", 10, two.outside))
    server = two.start_program(two.outside, "serve", "outside", str(TARGET))
    pods = "ip6 saddr fd00:244::/32 ip6 daddr != fd00:244::/32"
    pods = pods if v6 else "ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16"
    chain_of_cni = f"chain c {{\ntype nat hook postrouting priority srcnat\n{pods} masquerade\n}}"
    try:
        with rules(two.near, chain_of_cni):
            where = FRONTENDS.to("cluster", two.near, v6=v6)
            answer = send(two.sockets(two.unhooked), *where)
            assert answer.source == (two.near.v6 if v6 else two.near.v4)
            assert not [key for table in FLOW_MAPS for key, _ in two.maps[table].items()]
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("before", list(Engine))
def test_a_change_of_the_engine_breaks_nothing(two: TwoNodes, before: Engine) -> None:
    """The other engine continues each flow: same backend, no error."""
    after = next(engine for engine in Engine if engine is not before)
    _restart(two, before)
    streams, datagrams, firsts = [], [], []
    ways = ((two.outside, "nodeport"), (two.unhooked, "cluster"))
    for host, kind, v6 in ((*way, v6) for way in ways for v6 in (False, True)):
        where = FRONTENDS.to(kind, two.near, v6=v6)
        streams += [requests.tcp_socket(two.sockets(host), where[0]) for _ in range(6)]
        datagrams += [requests.udp_socket(two.sockets(host), where[0]) for _ in range(6)]
        for each in (*streams[-6:], *datagrams[-6:]):
            each.connect(where)
    for each in (*streams, *datagrams):
        if each in datagrams:
            each.send(b"?")
        firsts.append(each.recv(64))
    _restart(two, after)
    for each, first in zip((*streams, *datagrams), firsts, strict=True):
        each.send(b"still here")
        said = b"still here" if each in streams else first.removesuffix(b"?") + b"still here"
        assert each.recv(64) == said
        each.close()
    if before is Engine.NETFILTER:
        _restart(two, before)


def _restart(two: TwoNodes, engine: Engine) -> None:
    """Restart near's agent, which all these flows pass; it continues if it has this engine."""
    (agent,) = (agent for agent in two.agents if agent.node is two.near)
    chosen = (f"--packet-path={engine}",)
    if agent.defaults == chosen:
        return
    agent.stop()
    agent.defaults = chosen
    agent.start()
