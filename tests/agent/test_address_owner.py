# SPDX-License-Identifier: Apache-2.0
"""Which node answers for which address: agents on one segment, simulated, with their own clock.

Real are the owners' threads' turns; the segment, and what the programs answer, are simulated.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest

from ebpflb.agent.address_owner import INTERVAL, AddressOwner, Seen, View, uplink_of
from ebpflb.kernel.node.routes import Route
from ebpflb.kernel.segment import Answer
from ebpflb.model.addresses import Address
from ebpflb.model.cluster_state import SliceChange
from ebpflb.model.devices import Device
from ebpflb.model.endpoint_slices import Conditions
from ebpflb.model.events import Key
from ebpflb.model.pools import is_probed, parse_pools, ranked

WANTED = tuple(ip_address(f"192.0.2.{number}") for number in range(100, 112))
NAMES = ("one", "two", "three")
STRANGER = b"\x06\0\0\0\0\x01"


class Station:
    """A node: its agent, and its kernel with the program that answers."""

    def __init__(self, wire: "Wire", number: int) -> None:
        self.wire, self.node_name = wire, wire.names[number]
        self.mac = bytes([2, 0, 0, 0, 0, number])
        self.uplink = self.device = "eth0"  # as it is, and where the sockets are
        self.answers: set[Address] = set()  # outlives the agent
        self.lives: dict[Address, float] = {}  # until when it answers for these
        self.is_plugged = self.has_agent = True
        self.side = 0  # of a partition
        self.loses: set[Address] = set()  # the next question for these does not reach it
        self.proxy = b""  # the MAC address of a router that answers it for every node
        self.waiting: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Start the agent, or a new one."""
        self.has_agent, self.waiting = True, []
        here: Any = self
        self.owner = AddressOwner(
            here,
            here,
            lambda: here,
            here,
            open_segment=self.open,
            clock=lambda: self.wire.now,
        )
        self.wire.show(self)

    @property
    def seen(self) -> Seen:
        return self.owner.seen

    # The inbox

    def put(self, _: object) -> None:
        pass

    # The answerer

    @property
    def given(self) -> dict[Address, object]:
        return dict.fromkeys(self.answers)

    def give(self, address: Address, _: Device) -> None:
        self.answers.add(address)

    def withhold(self, addresses: Collection[Address]) -> None:
        self.answers -= {*addresses}

    def live(self, address: Address, _: Device, seconds: float) -> None:
        assert is_probed(address)
        self.lives[address] = self.wire.now + seconds

    def attach(self, _: object) -> None:
        pass

    def close(self) -> None:
        pass

    # The segment

    def open(self, device: Any) -> Any:
        self.device = device
        return self

    def join(self, _: Address) -> None:
        pass

    def ask(self, address: Address, mac: bytes = b"") -> None:
        for each in self.wire.others(self):
            if address in each.loses:
                each.loses.discard(address)
                continue
            has = address in each.answers or each.lives.get(address, -math.inf) > self.wire.now
            if has and mac in (b"", each.mac):
                self.waiting.append(Answer(address, each.mac))
        if self.proxy and is_probed(address):
            self.waiting.append(Answer(address, self.proxy))
        if address in self.wire.stolen:
            self.waiting.append(Answer(address, STRANGER))

    def announce(self, address: Address) -> None:
        self.wire.announced.append((self.node_name, address))
        self.wire.tell(self, Answer(address, self.mac))

    def take(self) -> Iterator[Any]:
        found, self.waiting = self.waiting, []
        yield from found


class Wire:
    """The segment with its stations."""

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        self.names, self.now, self.stations = names, 0.0, list[Station]()
        self.announced: list[tuple[str, Address]] = []
        self.stolen: set[Address] = set()
        self.reflects = False
        self.ready = {*names}
        self.unanswered = set[tuple[Address, float]]()  # when nobody did
        self.wanted: dict[Address, frozenset[str]] = dict.fromkeys(WANTED, frozenset())
        for number in range(len(names)):
            self.stations.append(Station(self, number))

    def show(self, *stations: Station) -> None:
        """Let the loops see Nodes and Services as they are now."""
        for each in stations or self.stations:
            uplink: Any = each.uplink
            known = frozenset(self.names)
            view = View(self.wanted, frozenset(self.ready) or known, known, uplink, "")
            each.owner.view, each.owner.is_new = view, False

    def others(self, station: Station) -> list[Station]:
        """The stations that this one reaches."""
        return [
            each
            for each in self.stations
            if each is not station
            and each.is_plugged
            and station.is_plugged
            and each.side == station.side
        ]

    def tell(self, sender: Station, what: object) -> None:
        for each in (*self.others(sender), *([sender] if self.reflects else [])):
            if each.has_agent:
                each.waiting.append(what)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += INTERVAL
            for each in self.stations:
                if each.has_agent:
                    each.owner.turn()
                its = {at for one in self.stations if one.is_plugged for at in one.answers}
                self.unanswered |= {(at, self.now) for at in self.wanted if at not in its}

    def owners(self) -> dict[Address, list[str]]:
        """Who answers for each address."""
        return {
            at: [each.node_name for each in self.stations if at in each.answers]
            for at in self.wanted
        }

    def check_owned_by(self, names: Collection[str]) -> None:
        """Each address by exactly the node of these that the hash names."""
        assert self.owners() == {at: ranked(str(at), names)[:1] for at in self.wanted}


@pytest.fixture
def wire() -> Wire:
    made = Wire()
    made.show()
    made.run(3)
    made.check_owned_by(NAMES)
    made.unanswered.clear()
    return made


def test_each_address_is_answered_for_by_one_node_which_announces_it(wire: Wire) -> None:
    """Everyone says the same in its status."""
    counts = Counter(at for _, at in wire.announced)
    assert counts.keys() == {*WANTED} and max(counts.values()) <= 9
    assert {name for name, _ in wire.announced} == {*NAMES}
    assert len({tuple(each.seen.owners.items()) for each in wire.stations}) == 1
    assert sum(each.seen.owned for each in wire.stations) == len(WANTED)


def test_the_cable_of_an_owner_is_pulled(wire: Wire) -> None:
    """The others have its addresses within 1.2 s; it keeps its own, and no other."""
    gone = wire.stations[0]
    had = set(gone.answers)
    gone.is_plugged = False
    wire.announced.clear()
    wire.run(1.5)
    assert max(at for _, at in wire.unanswered) < wire.now - 0.3
    others = NAMES[1:]
    assert {at for at, its in wire.owners().items() if [it for it in its if it != "one"]} == {
        *WANTED
    }
    assert gone.answers == had and gone.seen.not_announced
    assert had <= {at for name, at in wire.announced if name in others}
    wire.announced.clear()
    gone.is_plugged = True
    wire.run(2)
    wire.check_owned_by(NAMES)
    assert {at for _, at in wire.announced} >= {*WANTED}, "caches may have the former owner"


def test_a_partition_and_its_healing(wire: Wire) -> None:
    """Each side serves its clients; the smaller only what it had. Afterwards there is one owner."""
    wire.stations[2].side = 1
    had = set(wire.stations[2].answers)
    wire.run(3)
    assert wire.stations[2].answers == had
    wire.stations[2].side = 0
    wire.run(3)
    wire.check_owned_by(NAMES)


def test_a_firewall_between_all_nodes_makes_no_owners(wire: Wire) -> None:
    """They own what they owned, and a node that begins there owns nothing."""
    before = wire.owners()
    for side, each in enumerate(wire.stations):
        each.side = side
    wire.run(5)
    assert wire.owners() == before
    wire.stations[0].answers.clear()
    wire.stations[0].begin()
    wire.run(5)
    assert not wire.stations[0].answers and wire.stations[0].seen.not_announced


def test_the_last_node_owns_everything_when_the_others_are_not_ready(wire: Wire) -> None:
    for each in wire.stations[1:]:
        each.is_plugged = False
    wire.ready = {"one"}
    wire.show()
    wire.run(3)
    assert wire.stations[0].answers == {*WANTED}


def test_an_agent_that_restarts_moves_nothing(wire: Wire) -> None:
    """Its kernel keeps answering; the others leave it what it has, also for long."""
    before = wire.owners()
    wire.stations[0].has_agent = False
    wire.run(30)
    assert wire.owners() == before
    wire.announced.clear()
    wire.stations[0].begin()
    wire.run(3)
    assert wire.owners() == before


def test_an_agent_begins_beside_a_node_without_one(wire: Wire) -> None:
    """It has never heard that node, which keeps its addresses all the same, and is no stranger."""
    before = wire.owners()
    wire.stations[1].has_agent = False
    wire.run(30)
    wire.stations[0].begin()
    wire.run(10)
    assert wire.owners() == before
    assert not wire.stations[0].seen.conflicts and not wire.stations[0].seen.not_announced


def test_all_agents_are_killed(wire: Wire) -> None:
    """The programs keep answering; and the next agents change nothing."""
    before = wire.owners()
    for each in wire.stations:
        each.has_agent = False
    wire.run(10)
    for each in wire.stations:
        each.begin()
    wire.run(5)
    assert wire.owners() == before


def test_a_question_that_is_lost_moves_nothing(wire: Wire) -> None:
    """A node without an agent keeps its addresses although a question for them did not reach it."""
    before = wire.owners()
    wire.stations[0].has_agent = False
    wire.stations[0].loses = set(wire.stations[0].answers)
    wire.run(30)
    assert not wire.stations[0].loses and wire.owners() == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_former_owner_answers_until_the_new_one_does(wire: Wire, order: tuple[int, ...]) -> None:
    """Whichever node sees first that a node may not answer any more, or that it may again; also if
    that has just begun.
    """
    for ready in ({"two", "three"}, {*NAMES}):
        wire.ready = ready
        for number in order:
            wire.show(wire.stations[number])
            wire.run(0.6)
        wire.run(4)
        wire.check_owned_by(ready)
        assert not any(each.seen.conflicts for each in wire.stations)
    first = wire.stations[0]
    assert not wire.unanswered
    first.is_plugged = False
    wire.run(3)
    wire.unanswered.clear()
    first.answers.clear()
    first.is_plugged = True
    first.begin()
    wire.run(4)
    wire.check_owned_by(NAMES)
    assert not wire.unanswered


def test_an_address_moves_between_nodes_that_did_not_probe_each_other() -> None:
    """With the endpoints of policy Local, in a larger cluster: the former owner is no stranger, and
    knows the new one.
    """
    wire, (address, *_) = Wire(tuple(map(str, range(12)))), WANTED
    for node in "091":
        wire.wanted = {address: frozenset({node})}
        wire.show()
        wire.run(3 if node == "0" else 1)
        assert wire.owners() == {address: [node]}
        if node == "0":
            wire.unanswered.clear()
    assert not wire.unanswered and not any(each.seen.conflicts for each in wire.stations)


def test_a_node_without_an_agent_that_dies_is_replaced(wire: Wire) -> None:
    wire.stations[0].has_agent = False
    wire.run(10)
    wire.stations[0].is_plugged = False
    wire.stations[0].answers.clear()
    wire.run(3)
    wire.check_owned_by(NAMES[1:])


def test_nodes_with_endpoints_are_preferred(wire: Wire) -> None:
    wire.wanted = dict.fromkeys(WANTED, frozenset({"two", "gone"}))
    wire.show()
    wire.run(2)
    assert set(map(tuple, wire.owners().values())) == {("two",)}


def test_an_uplink_with_another_mac_address(wire: Wire) -> None:
    """The node announces there what it has: others have the former MAC address."""
    wire.run(5)
    station = wire.stations[0]
    station.uplink = "eth0 with another MAC address"
    wire.announced.clear()
    wire.show()
    wire.run(3)
    assert {*wire.announced} == {(station.node_name, address) for address in station.answers}


def test_a_node_that_comes_back_with_another_mac_address_is_no_stranger(wire: Wire) -> None:
    """Others have its addresses by then, and hear its announcements before its probes."""
    station = wire.stations[0]
    station.is_plugged = False
    wire.run(3)
    station.is_plugged, station.mac = True, bytes([2, 0, 0, 0, 1, 0])
    station.uplink = "eth0 with another MAC address"
    wire.show()
    wire.run(3)
    wire.check_owned_by(NAMES)
    assert not any(each.seen.conflicts for each in wire.stations)


@pytest.mark.parametrize(
    ("pool", "uplink", "elsewhere"),
    [
        ("192.0.2.200-192.0.2.210", "eth0", ""),
        ("203.0.113.200-203.0.113.210", "eth1", ""),
        ("198.51.100.200", "eth0", ""),
        ("203.0.113.200,192.0.2.200", "eth0", "203.0.113.200 is an address on the segment of eth1"),
    ],
)
def test_the_uplink_is_on_the_segment_of_the_pools(pool: str, uplink: str, elsewhere: str) -> None:
    """If there is none, or several, it is that with the Node's address."""
    node, other, router = map(ip_address, ["192.0.2.1", "203.0.113.1", "192.0.2.254"])
    devices = (
        Device(3, "eth1", False, True, 0, (other,), (), mac="02:00:00:00:00:02"),
        Device(2, "eth0", False, True, 0, (node,), (), mac="02:00:00:00:00:01"),
    )

    def route_to(address: Address) -> Route:
        if f"{address}".startswith("198."):
            return Route(2, "eth0", router)
        return Route(3 if f"{address}".startswith("203.") else 2)

    found, why = uplink_of(parse_pools([pool]), devices, [node], route_to)
    assert found and found.name == uplink
    assert why.startswith(elsewhere) and bool(why) == bool(elsewhere)


def test_own_frames_that_come_back_are_no_conflict(wire: Wire) -> None:
    """As they do at a bond whose switch knows nothing of it."""
    wire.reflects = True
    wire.stations[0].is_plugged = False
    wire.run(2)
    wire.stations[0].is_plugged = True
    wire.announced.clear()
    wire.run(5)
    wire.check_owned_by(NAMES)
    assert wire.announced and [each.seen.conflicts for each in wire.stations] == [{}, {}, {}]


def test_an_address_that_a_stranger_has_is_not_taken_and_named(wire: Wire) -> None:
    """Until the stranger has gone."""
    (new,) = map(ip_address, ["192.0.2.119"])
    wire.stolen = {new}
    wire.wanted = {**wire.wanted, new: frozenset()}
    wire.show()
    wire.run(5)
    assert wire.owners()[new] == []
    (named,) = [each for each in wire.stations if each.seen.conflicts]
    assert named.seen.conflicts == {str(new): f"{STRANGER.hex(':')} answers for it too"}
    wire.stolen = set()
    wire.run(70)
    wire.check_owned_by(NAMES)
    assert not any(each.seen.conflicts for each in wire.stations)


def test_a_stranger_that_claims_an_owned_address_is_named_and_contradicted(wire: Wire) -> None:
    address, station = WANTED[0], wire.stations[NAMES.index(wire.owners()[WANTED[0]][0])]
    wire.announced.clear()
    station.waiting.append(Answer(address, STRANGER))
    wire.run(2)
    assert (station.node_name, address) in wire.announced
    assert station.seen.conflicts


def test_forged_answers_for_other_addresses_change_nothing(wire: Wire) -> None:
    """Nor are they remembered."""
    for number in range(2000):
        forged = Answer(ip_address(0xF0000000 + number), STRANGER)
        other = Answer(ip_address(0xC0000300 + number), STRANGER)
        for each in wire.stations:
            each.waiting += [forged, other]
    wire.run(3)
    wire.check_owned_by(NAMES)
    assert all(len(each.owner.answers) + len(each.owner.macs) < 20 for each in wire.stations)


def test_a_router_that_answers_for_all_nodes_is_none(wire: Wire) -> None:
    """With proxy ARP every node would seem to live: it counts as hearing nobody."""
    before = wire.owners()
    alone = wire.stations[0]
    alone.side = 1
    alone.proxy = STRANGER
    wire.run(5)
    assert {at for at, its in before.items() if its == ["one"]} == alone.answers
    assert alone.seen.not_announced


def test_an_address_of_no_service_any_more_is_given_up(wire: Wire) -> None:
    wire.wanted = {WANTED[0]: frozenset()}
    wire.show()
    wire.run(1)
    assert sum(len(each.answers) for each in wire.stations) == 1


def test_a_busy_machine_moves_nothing(wire: Wire) -> None:
    """The agents do not run for seconds, one after the other: their kernels answer meanwhile."""
    before = wire.owners()
    for late in wire.stations:
        late.has_agent = False
        wire.run(4)
        late.has_agent = True
        wire.run(0.2)
        assert wire.owners() == before


def test_endpoints_are_read_again_only_after_their_slices_have_changed() -> None:
    """A change of one Service costs nothing for the endpoints of others, however many they are.
    Those that terminate count if none is ready: their node serves as long as they do.
    """
    web, read = Key("default", "web"), list[Key]()
    conditions = Conditions(ready=True, serving=True, terminating=False)
    one, two = (
        SimpleNamespace(conditions=conditions, name=SimpleNamespace(node=node))
        for node in ("one", "two")
    )
    two.conditions = leaving = Conditions(ready=False, serving=True, terminating=True)
    slice: Any = SimpleNamespace(service=web, endpoints=[one, two])

    def slices_for(service: Key) -> list[Any]:
        read.append(service)
        return [slice]

    cluster: Any = SimpleNamespace(
        node_name="one",
        claims=SimpleNamespace(pools=True, version=1, is_local=lambda service: True),
        slices_for=slices_for,
    )
    never: Any = None
    owner = AddressOwner(cluster, never, never, never)

    def nodes() -> frozenset[str]:
        return owner._nodes_with_endpoints(web)  # noqa: SLF001

    assert nodes() == nodes() == {"one"}
    assert read == [web]
    left = SliceChange(before=slice, after=None)
    applied = SimpleNamespace(slices={web: left}, services=frozenset())
    turn: Any = SimpleNamespace(node=False, applied=[(None, applied)])
    one.conditions = leaving
    owner.observe(turn)
    assert nodes() == {"one", "two"}
    assert read == [web, web]
