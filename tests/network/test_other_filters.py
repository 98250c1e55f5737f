# SPDX-License-Identifier: Apache-2.0
"""A program of others behind ours, at the uplink of a node with the conntrack engine. It lets every
packet go on, as most do, and by that takes away what ingress has noted in it for egress.
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
DROPPED_AFTER = 0.2  # seconds; at least what bpf/engine/conntrack/opening.h has
ALL, BEHIND_OURS = 3, 50  # ETH_P_ALL; a filter's priority
PASS = bytes.fromhex("b7000000000000009500000000000000")  # return TC_ACT_OK, which is TCX_PASS

Attached = Callable[[int, int], AbstractContextManager[None]]


@contextmanager
def by_clsact(program: int, index: int) -> Iterator[None]:
    where = {"parent": PARENTS["ingress"], "prio": BEHIND_OURS, "protocol": ALL}
    how = {"fd": program, "name": "other", "classid": 1, "direct_action": True}
    with IPRoute() as route:
        if tcx.works():
            route.tc("add", "clsact", index)
        route.tc("add-filter", "bpf", index, 1, **where, **how)
        yield
        route.tc("del-filter", "bpf", index, 1, **where)
        if tcx.works():
            route.tc("del", "clsact", index)


@contextmanager
def by_tcx(program: int, index: int) -> Iterator[None]:
    if not tcx.works():
        pytest.skip("this kernel has no tcx")
    link = kernel.link_create(program, index, tcx.TCX_HOOKS["ingress"])
    yield
    os.close(link)


@pytest.fixture(params=[by_tcx, by_clsact])
def beside(two: TwoNodes, request: pytest.FixtureRequest) -> Iterator[TwoNodes]:
    """Its service was asked and has answered; what follows is not answered."""
    two.publish(two.service("web", 10, two.here))
    two.delete_flows("other_flows")
    silent = rules(two.here, chain("output", "0", f"udp sport {TARGET} drop"))
    with passing(two.near, request.param):
        requests.udp(two.sockets(two.outside), *FRONTENDS.to("nodeport", two.near))
        with silent:
            yield two


@contextmanager
def passing(node: Host, attached: Attached) -> Iterator[None]:
    program = kernel.prog_load(
        name="other", program_type=SCHED_CLS, attach_type=0, code=PASS, log=None
    )
    with nodes.entered(node.netns), attached(program, socket.if_nametoindex("eth0")):
        yield
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
