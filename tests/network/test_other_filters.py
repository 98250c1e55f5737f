# SPDX-License-Identifier: Apache-2.0
"""Programs of others beside ours, and the packet's tc_index, in which ours note what egress is to
know: a program behind ours that lets every packet go on, as most do, takes the note away; the bits
in which Cilium's programs have flags stay as they are.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from pyroute2 import IPRoute

from ebpflb.agent.dropped_openings import DroppedOpenings
from ebpflb.datapath import kernel
from ebpflb.datapath.attach import tcx
from ebpflb.datapath.attach.clsact import PARENTS
from ebpflb.datapath.maps.layout import MAPS
from ebpflb.datapath.programs.loader import SCHED_CLS
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import Socket
from ebpflb.model.packet_path import Engine
from ebpflb.node import ctnetlink
from tests.kit import requests
from tests.kit.firewall import chain, rules
from tests.kit.lab_cluster import TARGET
from tests.kit.two_nodes import Frontends, TwoNodes
from tests.node import nodes

FRONTENDS = Frontends(10)
OPENINGS = MAPS["openings"].entries
SILENT = 0.5  # seconds without an answer
DROPPED_AFTER = 0.2  # seconds; at least what bpf/engine/conntrack/opening.h has
ALL = 3  # ETH_P_ALL
BEFORE_OURS, BEHIND_OURS = 1, 50  # a filter's priority
PASS = bytes.fromhex("b7000000000000009500000000000000")  # return TC_ACT_OK, which is TCX_PASS

FLAG = bytes.fromhex(  # Cilium's flags are six bits
    "b70200002a000000"  # r2 = 42
    "63212c0000000000"  # skb->tc_index = r2
    "b7000000ffffffff"  # return TC_ACT_UNSPEC, which is TCX_NEXT
    "9500000000000000"
)
ONLY_FLAGGED = bytes.fromhex(
    "b700000000000000"  # r0 = TC_ACT_OK
    "6112100000000000"  # r2 = skb->protocol
    "5502040008000000"  # if r2 != htons(ETH_P_IP) goto return
    "61122c0000000000"  # r2 = skb->tc_index
    "570200003f000000"  # r2 &= 63
    "150201002a000000"  # if r2 == 42 goto return
    "b700000002000000"  # r0 = TC_ACT_SHOT
    "9500000000000000"
)

Attached = Callable[..., AbstractContextManager[None]]


@contextmanager
def by_clsact(program: int, index: int, hook: str, priority: int) -> Iterator[None]:
    where = {"parent": PARENTS[hook], "prio": priority, "protocol": ALL}
    how = {"fd": program, "name": "other", "classid": 1, "direct_action": True}
    with IPRoute() as route:
        if tcx.works():
            route.tc("add", "clsact", index)
        route.tc("add-filter", "bpf", index, 1, **where, **how)
        try:
            yield
        finally:
            route.tc("del-filter", "bpf", index, 1, **where)
            if tcx.works():
                route.tc("del", "clsact", index)


@contextmanager
def by_tcx(program: int, index: int, hook: str, priority: int) -> Iterator[None]:
    if not tcx.works():
        pytest.skip("this kernel has no tcx")
    order = tcx.BEFORE if priority == BEFORE_OURS else 0
    link = kernel.link_create(program, index, tcx.TCX_HOOKS[hook], order)
    try:
        yield
    finally:
        os.close(link)


@pytest.fixture(params=[by_tcx, by_clsact])
def beside(two: TwoNodes, request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    """Its service was asked and has answered; what follows is not answered."""
    two.publish(two.service("web", 10, two.here))
    two.delete_flows("other_flows")
    silent = rules(two.here, chain("output", "0", f"udp sport {TARGET} drop"))
    with running(PASS, two.near, "eth0", request.param, "ingress", BEHIND_OURS):
        requests.udp(two.sockets(two.outside), *FRONTENDS.to("nodeport", two.near))
        with silent:
            yield two


@contextmanager
def running(
    code: bytes, node: Host, device: str, attached: Attached, *where: str | int
) -> Iterator[None]:
    """At a device of the node: ``where`` are a hook and a priority."""
    program = kernel.prog_load(
        name="other", program_type=SCHED_CLS, attach_type=0, code=code, log=None
    )
    try:
        with nodes.entered(node.netns), attached(program, socket.if_nametoindex(device), *where):
            yield
    finally:
        os.close(program)


def ask(two: TwoNodes) -> Socket:
    client = two.sockets(two.outside).open(socket.AF_INET, socket.SOCK_DGRAM)
    client.connect(FRONTENDS.to("nodeport", two.near))
    client.send(b"?")
    return client


def sources() -> set[int]:
    """The ports of clients whose entries conntrack has, in this namespace."""
    found = ctnetlink.connections(lambda _, __, port: port == FRONTENDS.nodeport)
    return {entry.original.source_port for entry in found}


@pytest.mark.parametrize("two", [Engine.CONNTRACK], indirect=True)
def test_a_flow_that_waits_for_its_answer_stays(beside: TwoNodes) -> None:
    """The agent's sweep does not take its request for dropped."""
    client = ask(beside)
    wait_until("it is opened", lambda: client.getsockname()[1] in sources())
    assert not beside.maps["opening_counts"].get(0).note_lost
    assert {it.left for _, it in beside.maps["openings"].items() if it.created} == {0}
    DroppedOpenings(beside.maps).sweep(time.monotonic_ns())
    assert client.getsockname()[1] in sources()


@pytest.mark.parametrize("two", [Engine.CONNTRACK], indirect=True)
def test_a_flow_stays_when_others_take_its_place(beside: TwoNodes) -> None:
    """Nor do the programs, once they have come to the place of one that was answered."""
    client, counts = ask(beside), beside.maps["opening_counts"]
    time.sleep(DROPPED_AFTER)
    opened = counts.get(0)
    counts.write([(0, opened._replace(opened=opened.opened + OPENINGS - 2))])
    for had in (opened.opened + OPENINGS - 2, opened.opened + OPENINGS - 1):
        ask(beside)
        wait_until("it is opened", lambda had=had: counts.get(0).opened > had)  # type: ignore[misc]
    assert counts.get(0).note_lost
    assert client.getsockname()[1] in sources()


@pytest.mark.parametrize("policy", ["Cluster", "Local"])
@pytest.mark.parametrize("two", list(Engine), indirect=True)
def test_the_flags_of_others_stay(two: TwoNodes, policy: str) -> None:
    """From before our ingress to behind our egress, in each packet of a flow."""
    two.publish(two.service("web", 10, two.here, externalTrafficPolicy=policy))
    attached, where = by_tcx if tcx.works() else by_clsact, FRONTENDS.to("nodeport", two.near)
    client = two.sockets(two.outside)
    with running(ONLY_FLAGGED, two.near, "veth11", attached, "egress", BEHIND_OURS):
        assert not requests.is_answered(requests.udp, client, where, SILENT)
        with running(FLAG, two.near, "eth0", attached, "ingress", BEFORE_OURS):
            assert requests.tcp(client, *where).name == two.here.name
            datagrams = requests.udp_socket(client, where[0])
            for _ in range(3):
                assert requests.exchange(datagrams, *where).name == two.here.name
