# SPDX-License-Identifier: Apache-2.0
"""Which node answers for which address: agents on one segment, simulated, with their own clock.

Real are the owners' threads' turns; the segment, and what the programs answer, are simulated.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.agent.pool_addresses import AddressOwner, Seen, View
from ebpflb.kernel.segment import Answer
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from ebpflb.model.pools import parse_pools
from ebpflb.plan.living_nodes import BEACON_INTERVAL, Beacon
from ebpflb.plan.pool_addresses import owner

POOLS = parse_pools(("192.0.2.100-192.0.2.120",))
WANTED = tuple(ip_address(f"192.0.2.{number}") for number in range(100, 112))
NAMES = ("one", "two", "three")
STRANGER = b"\x06\0\0\0\0\x01"


class Station:
    """A node: its agent, and its kernel with the program that answers."""

    def __init__(self, wire: "Wire", number: int) -> None:
        self.wire, self.name = wire, NAMES[number]
        self.mac = bytes([2, 0, 0, 0, 0, number])
        self.address = ip_address(f"192.0.2.{number + 1}")
        self.answers: set[Address] = set()  # outlives the agent
        self.is_plugged = self.has_agent = True
        self.side = 0  # of a partition
        self.waiting: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Start the agent, or a new one."""
        self.seen, self.has_agent, self.waiting = Seen(), True, []
        here: Any = self
        self.owner = AddressOwner(
            self.name,
            POOLS,
            lambda: here,
            here,
            open_segment=lambda device: here,
            clock=lambda: self.wire.now,
        )
        self.wire.show(self)

    # The inbox

    def put(self, seen: Seen) -> None:
        self.seen = seen

    # The answerer

    @property
    def given(self) -> dict[Address, object]:
        return dict.fromkeys(self.answers)

    def give(self, address: Address, _: Device) -> None:
        self.answers.add(address)

    def withhold(self, addresses: Collection[Address]) -> None:
        self.answers -= {*addresses}

    def attach(self, _: object) -> None:
        pass

    def close(self) -> None:
        pass

    # The segment

    def join(self, _: Address) -> None:
        pass

    def send_beacon(self, beacon: Beacon) -> None:
        self.wire.tell(self, (beacon, self.mac))

    def ask(self, address: Address) -> None:
        for each in self.wire.others(self):
            if address == each.address or address in each.answers:
                self.waiting.append(Answer(address, each.mac))
        if address in self.wire.stolen:
            self.waiting.append(Answer(address, STRANGER))

    def announce(self, address: Address) -> None:
        self.wire.announced.append((self.name, address))
        self.wire.tell(self, Answer(address, self.mac))

    def take(self) -> Iterator[Any]:
        found, self.waiting = self.waiting, []
        yield from found


class Wire:
    """The segment with its three stations."""

    def __init__(self) -> None:
        self.now, self.stations = 0.0, list[Station]()
        self.announced: list[tuple[str, Address]] = []
        self.stolen: set[Address] = set()
        self.blocks_beacons = False
        self.ready = {*NAMES}
        self.wanted: dict[Address, frozenset[str]] = dict.fromkeys(WANTED, frozenset())
        for number in range(len(NAMES)):
            self.stations.append(Station(self, number))

    def show(self, *stations: Station) -> None:
        """Let the loops see Nodes and Services as they are now."""
        device: Any = "eth0"
        addresses = {each.name: frozenset({each.address}) for each in self.stations}
        known = (
            addresses | {NAMES[len(addresses)]: frozenset()} if len(addresses) < 3 else addresses
        )
        ready = frozenset(self.ready)
        for each in stations or self.stations:
            view = View(wanted=self.wanted, nodes=known, ready=ready, eligible=ready)
            each.owner.show(view._replace(devices={4: device}))

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
        for each in self.others(sender):
            if each.has_agent and not (self.blocks_beacons and not isinstance(what, Answer)):
                each.waiting.append(what)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += BEACON_INTERVAL
            for each in self.stations:
                if each.has_agent:
                    each.owner.turn()

    def owners(self) -> dict[Address, list[str]]:
        """Who answers for each address."""
        return {
            at: [each.name for each in self.stations if at in each.answers] for at in self.wanted
        }

    def check_owned_by(self, names: Collection[str]) -> None:
        """Each address by exactly the node of these that the hash names."""
        assert self.owners() == {at: [owner(str(at), names)] for at in self.wanted}


@pytest.fixture
def wire() -> Wire:
    made = Wire()
    made.show()
    made.run(3)
    made.check_owned_by(NAMES)
    return made


def test_each_address_is_answered_for_by_one_node_which_announces_it(wire: Wire) -> None:
    """And one node alone may write. Everyone says the same in its status."""
    counts = Counter(at for _, at in wire.announced)
    assert counts.keys() == {*WANTED} and max(counts.values()) <= 9
    assert {name for name, _ in wire.announced} == {*NAMES}
    assert sum(each.owner.writes for each in wire.stations) == 1
    assert len({tuple(each.seen.owners.items()) for each in wire.stations}) == 1
    assert sum(each.seen.owned for each in wire.stations) == len(WANTED)


def test_the_cable_of_an_owner_is_pulled(wire: Wire) -> None:
    """The others have its addresses within 1.5 s; it keeps its own, and no other."""
    gone = wire.stations[0]
    had = set(gone.answers)
    gone.is_plugged = False
    wire.announced.clear()
    wire.run(1.5)
    others = NAMES[1:]
    assert {at for at, its in wire.owners().items() if [it for it in its if it != "one"]} == {
        *WANTED
    }
    assert gone.answers == had and not gone.owner.writes and gone.seen.not_announced
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
    assert not any(each.owner.writes for each in wire.stations)
    wire.stations[0].answers.clear()
    wire.stations[0].begin()
    wire.run(5)
    assert not wire.stations[0].answers and wire.stations[0].seen.not_announced


def test_a_filter_of_beacons_alone_makes_no_owners() -> None:
    """Each node hears that the others' kernels live, and no agent: none takes an address."""
    wire = Wire()
    wire.blocks_beacons = True
    wire.show()
    wire.run(5)
    assert not any(each.answers or each.owner.writes for each in wire.stations)
    assert all(each.seen.not_announced for each in wire.stations)
    wire.blocks_beacons = False
    wire.run(3)
    wire.check_owned_by(NAMES)
    before = wire.owners()
    wire.blocks_beacons = True
    wire.run(5)
    assert wire.owners() == before


def test_the_last_node_owns_everything_when_the_others_are_not_ready(wire: Wire) -> None:
    for each in wire.stations[1:]:
        each.is_plugged = False
    wire.ready = {"one"}
    wire.show()
    wire.run(3)
    assert wire.stations[0].answers == {*WANTED} and wire.stations[0].owner.writes


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


def test_a_node_without_an_agent_that_dies_is_replaced(wire: Wire) -> None:
    wire.stations[0].has_agent = False
    wire.run(10)
    wire.stations[0].is_plugged = False
    wire.stations[0].answers.clear()
    wire.run(3)
    wire.check_owned_by(NAMES[1:])


def test_a_node_that_is_not_ready_gives_its_addresses_up(wire: Wire) -> None:
    """Also one that is excluded from load balancers. If none is ready, all count."""
    wire.ready = {"two", "three"}
    wire.show()
    wire.run(2)
    wire.check_owned_by(["two", "three"])
    wire.ready = set()
    wire.show()
    wire.run(2)
    wire.check_owned_by(NAMES)


def test_nodes_with_endpoints_are_preferred(wire: Wire) -> None:
    wire.wanted = dict.fromkeys(WANTED, frozenset({"two", "gone"}))
    wire.show()
    wire.run(2)
    assert set(map(tuple, wire.owners().values())) == {("two",)}


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
    assert (station.name, address) in wire.announced
    assert station.seen.conflicts


def test_forged_beacons_of_unknown_nodes_change_nothing(wire: Wire) -> None:
    """Nor those of another cluster on the segment."""
    for number in range(100):
        forged = Beacon(f"forged-{number}", able=True, cluster=b"", pools=b"")
        other = Beacon("two", able=True, cluster=b"another", pools=b"")
        for each in wire.stations:
            each.waiting += [(forged, STRANGER), (other, STRANGER)]
    wire.run(3)
    wire.check_owned_by(NAMES)


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
