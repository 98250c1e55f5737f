# SPDX-License-Identifier: Apache-2.0
"""The part that writes to which nodes requests are handed: in turns, and again after a failure."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from ipaddress import ip_address, ip_network
from types import SimpleNamespace
from typing import Any

import pytest

from ebpflb.agent.hand_over import ATTACHED_AGAIN, LEFT_SECONDS, HandOver
from ebpflb.agent.loop import Turn
from ebpflb.agent.service_sync import BURST
from ebpflb.entries.services import Frontend
from ebpflb.errors import KernelError
from ebpflb.kernel.handing import HopEntry
from ebpflb.model.addresses import Family
from ebpflb.model.claims import NodeFacts
from ebpflb.model.facts import Fact, Observed
from ebpflb.model.hand_over import Hop, Hops
from ebpflb.model.nodes import Destination
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.handing import HandedFrontend, HandedPlace, HandingPlan, HandingPlanner, Room

UPLINK: Any = SimpleNamespace(index=2, mac="02:00:00:00:00:01")
TWO = Hop("two", ip_address("192.0.2.2"), UPLINK, bytes([2, 0, 0, 0, 0, 2]))
HOPS = Hops((TWO,), frozenset({TWO.mac}), uplinks=(UPLINK,))


def done(work: Callable[[], Any]) -> Future[Any]:
    made: Future[Any] = Future()
    made.set_result(work())
    return made


class Node:
    """What the part sees: the service ports in force, the other nodes, its maps, and a clock that
    goes on by a millisecond at each look.
    """

    def __init__(self) -> None:
        self.now, self.hops, self.written = 0.0, HOPS, set[PortName]()
        self.desired: dict[PortName, Any] = {}
        self.actual: dict[PortName, Any] = {}
        self.frontends: dict[Frontend, HandedFrontend] = {}
        self.places: dict[int, HandedPlace] = {}
        self.members: set[HandedPlace] = set()
        self.known: dict[str, HopEntry] = {}
        self.devices: list[Any] = []
        self.fails, self.rules, self.cost = False, dict[str, str](), 0.0
        # As ServiceSync, its planner, the cluster state, and Handing.
        self.room, self.variant, self.is_loaded = Room(1000, 1000), None, True
        self.node_name = "one"
        self.planner = SimpleNamespace(claims=self, actual=self.actual)
        self.options, self.namespace_share = self, 1.0
        self.node_sync, self.cluster, self.drop_rules = self, self, self
        self.device_list, self.addresses = self, set[Any]()
        self.claims, self.nodes = self, dict[str, NodeFacts]()
        self.observed = {Fact.HANDED_NODES: frozenset[Any]()}
        self.backlog: set[Any] = set()
        self.services: dict[Any, Any] = {}
        self.changed_services: set[Any] = set()
        self.part = self.made()

    def made(self, run: Callable[[Callable[[], Any]], Future[Any]] | None = None) -> HandOver:
        here: Any = self
        run = run or done
        return HandOver(here, lambda: self.hops, lambda: here, here, self.clock, run)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def find(self, address: Any, *_: Any) -> Destination | None:
        self.now += self.cost
        rule = self.rules.get(str(address))
        return Destination(frozenset(), (), rule) if rule else None

    def take_written(self) -> set[PortName]:
        taken, self.written = self.written, set()
        return taken

    def put(self, message: Observed) -> None:
        self.observed[message.fact] = message.values

    def read(self) -> Any:
        return dict(self.frontends), dict(self.places), set(self.members)

    def set_hops(self, hops: dict[str, HopEntry]) -> None:
        self.known = hops

    def write(self, plan: HandingPlan) -> None:
        self.places |= dict(plan.places)
        if self.fails:
            raise KernelError("writing", 28, "no space")
        self.members.update(plan.members)
        self.frontends |= plan.frontends
        for frontend in plan.removed_frontends:
            del self.frontends[frontend]
        self.members.difference_update(plan.removed_members)

    def attach(self, devices: Any) -> None:
        self.devices = list(devices)

    def serve(
        self, namespace: str, number: int, nodes: dict[str, int] | None, *, is_local: bool = True
    ) -> Frontend:
        """Plan a service port, which gets its frontend."""
        name = PortName(namespace, f"web-{number}", "", Protocol.TCP, Family.IPV4)
        frontend = Frontend(ip_address(f"203.0.113.{number}"), 80, 6)
        self.desired[name] = SimpleNamespace(handed_to=nodes, affinity_seconds=0)
        entry = SimpleNamespace(flags=frozenset({"external"}))
        self.actual[name] = SimpleNamespace(services={frontend: entry})
        self.services[name.owner] = (SimpleNamespace(external_local=is_local),)
        self.written.add(name)
        return frontend

    def turn(self, *, full: bool = False) -> None:
        self.part.observe(Turn(serves=True, full=full))

    def mac(self, frontend: Frontend) -> str:
        return self.places[self.frontends[frontend].base].mac


@pytest.fixture
def node() -> Node:
    made = Node()
    made.turn(full=True)
    made.turn()
    return made


def test_what_is_written_is_handed_over(node: Node) -> None:
    """By the MAC address of the node; this node's own, and the other's, are never handed on."""
    frontend, other = node.serve("shop", 1, {"two": 1}), node.serve("shop", 2, None)
    node.turn()
    assert node.mac(frontend) == "02:00:00:00:00:02" and other not in node.frontends
    assert {mac: it.families for mac, it in node.known.items()} == {
        "02:00:00:00:00:01": 0,
        "02:00:00:00:00:02": 1,
    }
    assert node.devices == [UPLINK]
    node.serve("shop", 1, None)
    node.turn()
    assert not node.frontends


def test_open_connections_are_noted_first(node: Node) -> None:
    """They were masqueraded here: only the program knows them apart, after it has seen a packet of
    each. Once for a service port, also if it changes or the agent starts anew, but again by a new
    agent if the former one was killed meanwhile.
    """
    frontend = node.serve("shop", 1, {"two": 1}, is_local=False)
    node.turn()
    node.part = node.made()
    node.turn(full=True)
    assert node.frontends[frontend].size == 0
    node.now = node.part.due
    node.turn()
    assert node.mac(frontend) == "02:00:00:00:00:02"
    node.serve("shop", 1, {"two": 1, "one": 1}, is_local=False)
    node.turn()
    node.part = node.made()
    node.turn(full=True)
    assert node.frontends[frontend].size > 1


def test_an_address_that_a_rule_drops_is_named(node: Node) -> None:
    """While the Service is there, and the rule."""
    node.rules = {"203.0.113.1": "chain ban", "203.0.113.2": "chain ban"}
    first, second = node.serve("shop", 1, {"two": 1}), node.serve("shop", 2, {"two": 1})
    node.turn()
    assert not node.frontends
    named = {address: said for its in node.part.dropped.values() for address, said in its.items()}
    assert named.keys() == node.rules.keys() and "chain ban: its" in named["203.0.113.1"]
    del node.rules["203.0.113.1"]
    node.serve("shop", 1, {"two": 1})
    node.serve("shop", 2, None)
    node.turn()
    assert not node.part.dropped and first in node.frontends and second not in node.frontends


def test_addresses_of_hosts_are_not_handed_over(node: Node) -> None:
    """A tenant may claim any port of this node and of pods: answers to their own connections come
    there.
    """
    frontend, other = node.serve("shop", 1, {"two": 1}), node.serve("shop", 2, {"two": 1})
    node.serve("shop", 64, {"two": 1})
    pods = NodeFacts(True, True, (), (ip_network("203.0.113.64/27"),))
    node.nodes["two"] = pods
    node.turn(full=True)
    assert node.frontends.keys() == {frontend, other}
    node.addresses = {frontend.address}
    node.part.observe(Turn(serves=True, node=True))
    assert node.frontends.keys() == {other}
    node.addresses = set()
    node.part.observe(Turn(serves=True, node=True))
    assert node.frontends.keys() == {frontend, other}


def test_many_tables_of_a_namespace_delay_no_other(node: Node) -> None:
    for number in range(1, 101):
        node.serve("many", number, {"two": 1})
    other = node.serve("shop", 200, {"two": 1})
    node.turn()
    assert other in node.frontends and len(node.frontends) < 20
    assert node.part.due <= node.now
    for _ in range(20):
        node.turn()
    assert len(node.frontends) == 101


def test_a_namespace_without_end_of_work_gets_a_part_of_the_time(node: Node) -> None:
    """So the loop sleeps, and others go on."""
    node.cost = BURST / 4
    for number in range(1, 11):
        node.serve("many", number, {"two": 1})
    for _ in range(20):
        node.turn()
    assert 4 <= len(node.frontends) < 7 and node.part.due > node.now
    node.serve("shop", 200, {"two": 1})
    before = len(node.frontends)
    for _ in range(2):
        node.turn()
    assert len(node.frontends) == before + 1 and node.part.due > node.now
    for _ in range(2):  # the last turn's own time is made up for, too
        node.now = node.part.due
        node.turn()
    assert len(node.frontends) == before + 2


def test_what_lacks_space_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has made room; it is named once."""
    node = Node()
    node.room = Room(1000, 1)
    node.turn(full=True)
    first, second = node.serve("shop", 1, {"two": 1}), node.serve("other", 2, {"two": 1})
    node.turn()
    for _ in range(2):
        node.now += ATTACHED_AGAIN
        node.turn()
    assert len(caplog.messages) == 1 and "no space left" in caplog.text
    (has,) = node.frontends
    namespace, number = ("shop", 1) if has == first else ("other", 2)
    node.serve(namespace, number, None)
    node.turn()
    node.now += ATTACHED_AGAIN
    node.turn()
    assert node.frontends.keys() == {first, second} - {has}


def test_after_a_failed_write_all_is_written_again(node: Node) -> None:
    frontend, node.fails = node.serve("shop", 1, {"two": 1}), True
    with pytest.raises(KernelError):
        node.turn()
    node.fails = False
    node.turn()
    assert not node.frontends, "it rests"
    assert node.now < node.part.due < node.now + 2
    node.now = node.part.due
    node.turn()
    assert node.mac(frontend) == "02:00:00:00:00:02"


def test_the_loop_goes_on_while_full_maps_are_read(node: Node) -> None:
    """In a thread; until then nothing is written."""
    frontend, reading = node.serve("shop", 1, {"two": 1}), Future[Any]()
    node.part = node.made(lambda work: reading)
    node.turn(full=True)
    assert not node.frontends and node.now < node.part.due < node.now + 1
    reading.set_result(HandingPlanner(node.room, 1.0))
    node.now = node.part.due
    node.turn()
    assert frontend in node.frontends


def test_it_waits_while_nothing_is_served(node: Node) -> None:
    """Without keeping the loop busy."""
    frontend = node.serve("shop", 1, {"two": 1})
    node.part.observe(Turn(serves=False))
    assert node.part.due == math.inf
    node.turn()
    assert frontend in node.frontends


@pytest.mark.parametrize("endless", [False, True])
def test_a_new_agent_keeps_what_is_there_until_all_is_planned(node: Node, *, endless: bool) -> None:
    """Then what nobody wants any more goes; in any case after some time, whoever has changes."""
    frontend, gone = node.serve("shop", 1, {"two": 1}), node.serve("shop", 2, {"two": 1})
    node.turn()
    for table in (node.desired, node.actual):
        name = next(it for it in table if it.service == "web-2")
        del table[name]
    node.part = node.made()
    node.backlog.add("something")
    node.turn(full=True)
    assert {frontend, gone} == node.frontends.keys()
    if endless:
        node.now += LEFT_SECONDS
    else:
        node.backlog.clear()
    node.turn()
    assert {frontend} == node.frontends.keys()
