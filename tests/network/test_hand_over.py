# SPDX-License-Identifier: Apache-2.0
"""Requests that come in by a node without their endpoint are handed to one with it by MAC address:
the endpoint sees the client, and answers it past the first node (docs/client-addresses.md).
"""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.model.annotations import FORWARDING_ANNOTATION
from ebpflb.model.packet_path import Engine
from tests.kit import monitors, requests, two_nodes
from tests.kit.handing_nodes import KEEP, LOCAL, NAMES, OPTIONS, ThreeNodes
from tests.kit.lab_cluster import PORT, started
from tests.kit.parameters import families
from tests.kit.pod_networks import Routed

LATE = ("203.0.113.30", "fd03:113::30")


@pytest.fixture(scope="module", params=two_nodes.ENGINES, ids=str)
def three(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ThreeNodes]:
    two_nodes.require(request.param, Routed())
    folder = tmp_path_factory.mktemp("three")
    with started(lambda lab: ThreeNodes(lab, folder, request.param)) as made:
        yield made


@pytest.fixture
def cluster(three: ThreeNodes) -> ThreeNodes:
    """Both Services have their endpoint on node three, requests come in by node one."""
    three.believe({name: {*NAMES} for name in NAMES})
    three.publish(three.local("three"), three.keep("three"))
    own = three.outside.v4, three.outside.v6
    for entry in ("two", "one"):
        three.lead(entry)
        for addresses in (LOCAL, KEEP):
            for address, client in zip(addresses, own, strict=True):
                wait_until("it is handed over", partial(three.sees_client, address, client))
    subprocess.run([*three.nodes[0].enter, "conntrack", "-F"], check=True, capture_output=True)
    return three


@families
@pytest.mark.parametrize("addresses", [LOCAL, KEEP], ids=["local", "keep-client"])
def test_an_endpoint_elsewhere_sees_its_client(
    cluster: ThreeNodes, addresses: tuple[str, str], v6: bool
) -> None:
    """By TCP, UDP, datagrams in fragments and large segments; only its node tracks connections."""
    where, client = addresses[v6], cluster.outside
    sockets, own = cluster.sockets(client), client.v6 if v6 else client.v4
    for said in (
        requests.tcp(sockets, where),
        requests.udp(sockets, where),
        requests.fragmented(sockets, where, size=4000),
    ):
        assert (said.name, said.source, said.peer) == ("pod-three", own, (where, PORT))
    assert cluster.echo(client, where, PORT, 3 << 20) == "pod-three"
    assert cluster.tracked("one", where) == []
    assert all("[ASSURED]" in line for line in cluster.tracked("three", where))
    if cluster.engine is Engine.NETFILTER:
        assert cluster.tracked("three", where)


@families
@pytest.mark.parametrize("addresses", [LOCAL, KEEP], ids=["local", "keep-client"])
def test_connections_go_on(cluster: ThreeNodes, addresses: tuple[str, str], v6: bool) -> None:
    """By another entry from now on, and while endpoints come and go on other nodes. No node that
    hands it on believes it to be lost, as it does of those that it forwards without a reply.
    """
    where, sockets = addresses[v6], cluster.sockets(cluster.outside)
    client, name = requests.connected(sockets, where, PORT)
    with client:
        assert name == "pod-three" and requests.lives(client)
        unanswered = {it.source_port for it, _ in cluster.maps["forwarded"].items()}
        assert client.getsockname()[1] not in unanswered
        cluster.lead("two")
        assert requests.lives(client)
        cluster.lead("one")
        cluster.publish(cluster.local("two"), cluster.keep("two"))
        assert requests.lives(client)
        assert {requests.tcp(sockets, where).name for _ in range(5)} == {"pod-two"}
        cluster.publish(cluster.local("one"), cluster.keep("one"))
        assert requests.lives(client)
        assert requests.tcp(sockets, where).name == "pod-one"


@families
def test_without_a_node_to_hand_to(cluster: ThreeNodes, v6: bool) -> None:
    """Everything is as without the option: policy Local drops, policy Cluster masquerades; new
    connections are handed over again as soon as they may be, and those from then go on.
    """
    sockets, node = cluster.sockets(cluster.outside), cluster.nodes[0]
    cluster.publish(cluster.local("three"), cluster.keep("two", "three"))
    cluster.believe({name: {"two"} for name in NAMES})  # three has an endpoint, too
    own = node.v6 if v6 else node.v4
    wait_until("requests are masqueraded", lambda: cluster.sees(KEEP[v6]).endswith(own))
    wait_until("requests are dropped", lambda: not cluster.sees(LOCAL[v6]))
    client, name = requests.connected(sockets, KEEP[v6], PORT)
    with client:
        cluster.believe({it: {*NAMES} for it in NAMES})
        wait_until("requests are handed over", lambda: not cluster.sees(KEEP[v6]).endswith(own))
        assert requests.lives(client), name
        assert cluster.sees(LOCAL[v6])


def test_a_connection_from_before_goes_on(cluster: ThreeNodes) -> None:
    """It was masqueraded by node one when its Service had not asked to keep its clients."""
    usual, sockets = cluster.local("three"), cluster.sockets(cluster.outside)
    late = partial(cluster.service, "late", 3, LATE, ["three"])
    cluster.publish(usual, late())
    client, _ = requests.connected(sockets, LATE[0], PORT)
    with client:
        cluster.publish(usual, late({FORWARDING_ANNOTATION: "keep-client"}))

        def is_handed_over() -> bool:
            assert requests.lives(client)
            return cluster.sees_client(LATE[0], cluster.outside.v4)

        wait_until("new ones are handed over", is_handed_over)
        assert requests.lives(client)


def test_a_monitor_sees_what_is_handed_over(cluster: ThreeNodes, tmp_path: Path) -> None:
    """With the address of the node; afterwards the usual program runs again."""
    agent, where = cluster.agents[0], cluster.outside.v4
    with monitors.watching(agent, tmp_path) as monitor:

        def told() -> bool:
            assert cluster.sees(LOCAL[0])
            events = [it for it in monitor.events() if it["verdict"] == "handed"]
            return any(it["client"].startswith(where) for it in events)

        wait_until("an event", told, 60)
    assert cluster.sees(LOCAL[0])


def test_without_the_option_nothing_is_left(three: ThreeNodes) -> None:
    """Neither a program at the device nor hand-overs; with it everything comes back."""
    agent = three.agents[0]
    agent.stop()
    assert three.sees(LOCAL[0]), "the program outlives the agent"
    agent.options = OPTIONS[1:]
    agent.start()
    assert not three.sees(LOCAL[0])
    assert not list((agent.paths.state / "devices" / "hand-over").iterdir())
    agent.stop()
    agent.options = OPTIONS
    agent.start()
    wait_until("requests are handed over", lambda: bool(three.sees(LOCAL[0])))
