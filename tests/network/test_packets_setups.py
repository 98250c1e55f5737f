# SPDX-License-Identifier: Apache-2.0
"""With any CNI, on nodes hardened in any way, nothing fails and nothing is dropped.

Unhooked pods and outside clients send packets to an endpoint on this node and to one on another.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from ebpflb.lab import cni
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kit import pod_networks, requests, two_nodes
from tests.kit.parameters import families
from tests.kit.pod_networks import Overlay, Routed
from tests.kit.two_nodes import CLUSTER_CIDR, Frontends, TwoNodes
from tests.network import hardening

SETUPS: dict[str, tuple[cni.Cni, Iterable[Callable[[Host], None]], Engine]] = {
    "strict rp_filter": (cni.Bridge(), [hardening.strict_reverse_path], Engine.FLOWS),
    "invalid drop": (cni.Bridge(), [hardening.drop_invalid], Engine.FLOWS),
    "forward drop": (
        cni.Bridge(),
        [hardening.drop_forwarded, hardening.masquerade_pods],
        Engine.FLOWS,
    ),
    "bridge": (cni.Bridge(), hardening.EVERYTHING, Engine.FLOWS),
    "routed": (Routed(), hardening.EVERYTHING, Engine.FLOWS),
    "overlay": (Overlay(), hardening.EVERYTHING, Engine.FLOWS),
    "overlay, nothing tracked": (Overlay(), (), Engine.FLOWS),  # nor are fragments reassembled
    # As kube-proxy, netfilter needs hairpin mode (test_hairpin_mode).
    "netfilter bridge": (cni.Bridge(hairpin=True), hardening.EVERYTHING, Engine.NETFILTER),
    "netfilter routed": (Routed(), hardening.EVERYTHING, Engine.NETFILTER),
    "netfilter overlay": (Overlay(hairpin=True), hardening.EVERYTHING, Engine.NETFILTER),
}
NETWORKS = {
    "ptp": pod_networks.Ptp(),
    "netkit": pod_networks.Netkit(),
    "netkit unscrubbed": pod_networks.Netkit(scrubbed=False),
    "netkit l2": pod_networks.NetkitL2(),
    "macvlan": pod_networks.Children("macvlan mode bridge"),
    "ipvlan": pod_networks.Children("ipvlan mode l2"),
    "ipvlan beside veth": pod_networks.Beside("ipvlan mode l2"),
    "source rules": pod_networks.SourceRules(),
    "second uplink": pod_networks.SecondUplink(),
    "wireguard": pod_networks.WireGuard(),
    "vrf": pod_networks.Vrf(),
    "bond": pod_networks.Bond(),
    "bridge uplink": pod_networks.BridgeUplink(),
}
SETUPS |= {
    f"{engine} {name}": (network, (), engine)
    for name, network in NETWORKS.items()
    for engine in Engine
}
# The kernel hands what one ipvlan device sends to another's address straight to that device. So a
# pod's reply to another pod of its node meets no program and no netfilter, unless the request was
# masqueraded; and a request that was translated at ingress cannot be.
del SETUPS["flows ipvlan"]
MASQUERADED, ASTRAY = "--masquerade-all", "flows second uplink"
OPTIONS: dict[str, Iterable[str]] = {
    "netfilter ipvlan": [MASQUERADED],
    "netfilter ipvlan beside veth": [MASQUERADED],
    "flows ipvlan beside veth": [MASQUERADED],
    ASTRAY: ["--reply-path=request-device"],
} | {f"{engine} bridge uplink": pod_networks.BridgeUplink.OPTIONS for engine in Engine}
NUMBER, SELF, TIMES = 10, 20, 200
CLIENTS = {"unhooked": "cluster", "outside": "nodeport"}


@pytest.fixture(scope="module", params=SETUPS)
def two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    network, measures, engine = SETUPS[request.param]
    two_nodes.require(engine, network)
    folder = tmp_path_factory.mktemp("two")
    options = (*CLUSTER_CIDR, *OPTIONS.get(request.param, ()))
    with two_nodes.running(folder, *options, network=network, engine=engine) as made:
        for node in (made.near, made.far):
            for measure in measures:
                measure(node)
        web = made.service("web", NUMBER, made.here, made.there)
        made.publish(web, made.service("self", SELF, made.twin))
        yield made


@pytest.fixture(autouse=True)
def untouched(two: TwoNodes) -> Iterator[None]:
    """Check at the end of each test which packets the node's rules have seen."""
    yield
    assert [hardening.touched(node) for node in (two.near, two.far)] == [{}, {}]


@families
@pytest.mark.parametrize("protocol", ["tcp", "udp", "connected-udp"])
@pytest.mark.parametrize("who", CLIENTS)
def test_nothing_fails(two: TwoNodes, who: str, protocol: str, v6: bool) -> None:
    """Every connection and datagram is answered, from the requested address."""
    where = Frontends(NUMBER).to(CLIENTS[who], two.near, v6=v6)
    said = two.request(getattr(two, who), protocol, *where, TIMES)
    assert not said["errors"]
    assert said["names"].keys() == {"here", "there"}
    assert said["peers"] == {where[0]: TIMES}


@families
@pytest.mark.parametrize("who", CLIENTS)
def test_a_megabyte_returns_unchanged(two: TwoNodes, who: str, v6: bool) -> None:
    """A megabyte is sent and returned unchanged, with large segments."""
    client: Host = getattr(two, who)
    where = Frontends(NUMBER).to(CLIENTS[who], two.near, v6=v6)
    names: set[str] = set()
    for _ in range(4):  # the other endpoint is missed as often once in 2**40 times
        found = two.echoes(client, *where, times=10)
        assert len(found) == 10
        names.update(found)
        if len(names) > 1:
            break
    assert names == {"here", "there"}


@families
def test_the_client_is_seen(two: TwoNodes, request: pytest.FixtureRequest, v6: bool) -> None:
    """An endpoint whose replies pass this node sees the client's address. If its replies take
    another way, it sees the node's address, as with kube-proxy.
    """
    sockets, where = two.sockets(two.outside), Frontends(NUMBER).to("nodeport", two.near, v6=v6)
    answers = (requests.tcp(sockets, *where) for _ in range(40))
    seen = {answer.source for answer in answers if answer.name == "here"}
    client = two.near if request.node.callspec.params["two"] == ASTRAY else two.outside
    assert seen == {client.v6 if v6 else client.v4}
