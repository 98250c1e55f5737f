# SPDX-License-Identifier: Apache-2.0
"""tc programs of other software before and after ours, and packet fields that both use.

Our programs write a choice into the packet's priority; Cilium's programs keep flags in some bits of
its tc_index.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from pyroute2.iproute import IPRoute

from ebpflb.kernel import bpf
from ebpflb.kernel.attach import tcx
from ebpflb.kernel.attach.clsact import PARENTS
from ebpflb.kernel.netfilter.probe import Arrival
from ebpflb.kernel.netfilter.table import CANARY
from ebpflb.kernel.programs.loader import SCHED_CLS
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from ebpflb.plan.canary import is_canary
from ebpflb.serve import status
from ebpflb.serve.conditions import Cause
from tests.kernel.node import nodes
from tests.kit import answers, requests
from tests.kit.parameters import protocols
from tests.kit.two_nodes import Frontends, TwoNodes

FRONTENDS = Frontends(10)
ALL = 3  # ETH_P_ALL
BEFORE_OURS, BEHIND_OURS = 1, 50  # a filter's priority
PASS = bytes.fromhex("b7000000000000009500000000000000")  # return TC_ACT_OK, which is TCX_PASS


DROP = bytes.fromhex("b7000000020000009500000000000000")  # return TC_ACT_SHOT
FORGET = bytes.fromhex(
    "b402000000000000"  # w2 = 0
    "6321200000000000"  # skb->priority = w2
    "b7000000ffffffff9500000000000000"  # return TC_ACT_UNSPEC
)
LOSSES = {"forgotten": (FORGET, Arrival.CHOICE_LOST), "dropped": (DROP, Arrival.LOST)}


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
    link = bpf.link_create(program, index, tcx.TCX_HOOKS[hook], order)
    try:
        yield
    finally:
        os.close(link)


@contextmanager
def running(
    code: bytes, node: Host, device: str, attached: Attached, *where: str | int
) -> Iterator[None]:
    """Run a program at a device of the node: ``where`` has a hook and a priority."""
    program = bpf.prog_load(
        name="other", program_type=SCHED_CLS, attach_type=0, code=code, log=None
    )
    try:
        with nodes.entered(node.netns), attached(program, socket.if_nametoindex(device), *where):
            yield
    finally:
        os.close(program)


@pytest.mark.parametrize("attached", [by_tcx, by_clsact])
@protocols
@pytest.mark.parametrize("two", [Engine.NETFILTER], indirect=True)
def test_a_program_behind_ours_lets_the_choice_pass(
    two: TwoNodes, send: requests.Send, attached: Attached
) -> None:
    """The program ends the chain of programs, as most programs do."""
    two.publish(two.service("web", 10, two.here))
    with running(PASS, two.near, "eth0", attached, "ingress", BEHIND_OURS):
        for v6 in (False, True):
            where = FRONTENDS.to("nodeport", two.near, v6=v6)
            assert send(two.sockets(two.outside), *where).name == "here"


def canaries(two: TwoNodes) -> list[str]:
    """Return what is left of the canary at the near node: service ports, and its table."""
    names = [str(name) for _, name in two.maps["service_names"].items() if is_canary(name)]
    with nodes.entered(two.near.netns):
        tables = nodes.run("nft", "list", "tables").split()
    return [*names, *(it for it in tables if it == CANARY.table)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("two", [Engine.NETFILTER], indirect=True)
def test_an_uplink_that_loses_choices_is_noticed(two: TwoNodes, loss: str) -> None:
    """The agent, which is then not ready, and doctor name the device."""
    code, arrival = LOSSES[loss]

    def lost() -> dict[str, str]:
        published = status.read(two.agents[0].paths)
        return dict(published.choices_lost) if published else {}

    with running(code, two.near, "eth0", by_clsact, "ingress", BEHIND_OURS):
        wait_until("it is noticed", lambda: lost() == {"eth0": str(arrival)})
        assert f"DEGRADED ({Cause.CHOICES_LOST})" in two.ebpflb("status").stdout
        results = answers.results(two.ebpflb("doctor", "-o", "json").stdout)
        found = next(it for it in results if it["feature"] == "canary: uplinks")
        assert (found["required"], found["detail"]) == (True, f"eth0: {arrival}")
    wait_until("its end is noticed", lambda: not lost())
    wait_until("nothing is left", lambda: canaries(two) == [])
