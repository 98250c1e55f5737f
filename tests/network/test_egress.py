# SPDX-License-Identifier: Apache-2.0
"""Without a program at egress: what it would do is not missed on the engine netfilter, and it comes
while the flow tables or endpoint health need it.
"""

import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ebpflb.kernel.attach.device_programs import attacher
from ebpflb.kernel.attach.tcx import Tcx
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter import held_ports
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.parameters import netfilter
from tests.kit.scheduled import WEB, service
from tests.kit.sockets import Socket
from tests.kit.two_nodes import TwoNodes
from tests.load import paused, scaled

pytestmark = netfilter
DATAGRAMS = 40
OTHERS = 10  # at most so many packets of the kernel itself, such as neighbour solicitations


def at_egress(two: TwoNodes) -> set[str]:
    """The devices of near with a program at egress."""
    with nodes.entered(two.near.netns):
        made = attacher(StateDir(two.agents[0].paths.state))
        hooks = made.programs if isinstance(made, Tcx) else made.hooks_at
        return {name for index, name in socket.if_nameindex() if "egress" in hooks(index)}


def has_flow(two: TwoNodes) -> bool:
    return held_ports.has_flows(two.maps_of(two.agents[0]))


def ways(two: TwoNodes) -> list[tuple[Host, tuple[str, int]]]:
    """The clients by packets, and what they ask, by both families."""
    return [
        (who, WEB.to(kind, two.near, v6=v6))
        for who, kind in ((two.outside, "nodeport"), (two.unhooked, "cluster"))
        for v6 in (False, True)
    ]


def dial(two: TwoNodes, opened: ExitStack) -> list[Socket]:
    """Open connections, one for each of the ways."""
    made = [requests.connected(two.sockets(who), *where)[0] for who, where in ways(two)]
    return [opened.enter_context(each) for each in made]


@pytest.fixture
def pressed(two: TwoNodes) -> Iterator[None]:
    """By clients whose connections and datagrams must not fail meanwhile."""
    two.publish(service(two, "random"))
    pressing = [
        two.start_client(who, protocol, *where, pause=paused(0.01))
        for who, where in ways(two)
        for protocol in ("tcp", "udp")
    ]
    yield
    assert [two.stop_client(each)["errors"] for each in pressing] == [{}] * len(pressing)


def test_a_service_of_the_flow_tables_comes_and_goes(
    two: TwoNodes, opened: ExitStack, pressed: None
) -> None:
    """Each new connection opens, by netfilter until all devices have the program; each open one
    goes on, and the program stays as long as the flow tables have a flow.
    """
    two.delete_all_flows()  # of former tests
    wait_until("no program is at egress", lambda: not at_egress(two))
    clients = dial(two, opened)
    assert not has_flow(two)
    two.publish(service(two, "least-connections"))
    while not has_flow(two):
        clients += dial(two, opened)
    assert at_egress(two)
    two.publish(service(two, "random"))
    clients += dial(two, opened)
    assert all(requests.lives(each) for each in clients)
    assert at_egress(two)


def test_the_engine_changes(two: TwoNodes, opened: ExitStack, pressed: None) -> None:
    """With a restart, there and back: 500 open connections go on, and new ones open meanwhile."""
    clients = [client for _ in range(scaled(125)) for client in dial(two, opened)]
    agent = two.agents[0]
    for engine in (Engine.FLOWS, Engine.NETFILTER):
        agent.stop()
        agent.defaults = (f"--packet-path={engine}",)
        agent.start()
        assert all(requests.lives(each) for each in clients)
        clients += dial(two, opened)
    two.publish(service(two, "least-connections"))
    assert all(requests.lives(each) for each in clients)


@pytest.mark.parametrize(
    "qdisc",
    ["prio bands 2 priomap 0{}", "mqprio num_tc 2 map 0{} queues 1@0 1@1 hw 0"],
    ids=["prio", "mqprio"],
)
def test_a_choice_picks_no_band(two: TwoNodes, qdisc: str) -> None:
    """Of prio and mqprio: IPv6 datagrams that near forwards, first and later ones, leave by the
    band of any forwarded packet without a choice.
    """
    words = qdisc.format(" 1" * 15).split()
    two.publish(service(two, "random", "there"))
    add_band_device(two)
    try:
        tc = [*two.near.enter, "tc"]
        where = ["dev", "bands0"]
        made = subprocess.run(
            [*tc, "qdisc", "replace", *where, "root", "handle", "1:", *words], check=False
        )
        if made.returncode:
            pytest.skip(f"this kernel has no {words[0]}")
        client, to = two.sockets(two.outside), WEB.to("nodeport", two.near, v6=True)
        for _ in range(4):
            with requests.udp_socket(client, to[0]) as flow:
                for _ in range(DATAGRAMS // 4):
                    assert requests.exchange(flow, *to).name == "there"
        shown = subprocess.check_output([*tc, "-s", "class", "show", *where], text=True)
        found = re.findall(r"class \w+ 1:(\d+) .*\n Sent \d+ bytes (\d+) pkt", shown)
        packets = {int(band): int(number) for band, number in found}
        assert packets[1] >= DATAGRAMS
        assert packets[2] <= OTHERS, shown
    finally:
        two.near.ip("link del bands0")


def add_band_device(two: TwoNodes) -> None:
    """A second link from near to far, with two queues, by which near reaches the pod there."""
    near, far = two.near, two.far
    queues = "numtxqueues 2 numrxqueues 2"
    near.ip(f"link add bands0 {queues} type veth peer name bands1 {queues} netns {far.netns}")
    for node, device, address in ((near, "bands0", "fd09::1"), (far, "bands1", "fd09::2")):
        node.ip(f"address add {address}/64 dev {device}", f"link set {device} up")
    near.ip(f"route replace {two.there.v6}/128 via fd09::2 dev bands0", v6=True)
