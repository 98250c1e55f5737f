# SPDX-License-Identifier: Apache-2.0
"""The state read back from maps that another agent left (map_contents.py)."""

from ipaddress import IPv4Address

from ebpflb.entries.services import (
    NO_SLOT,
    Backend,
    BackendName,
    Frontend,
    LastIds,
    Range,
    ServiceEntry,
)
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.planner import Planner
from tests.plan.builders import CAPACITY, CLUSTER, by_name, desired, frontend, name
from tests.plan.node import PlannedNode, check_tidy
from tests.plan.simulation import Maps

NO_FLAGS = frozenset[str]()
OLD, NEW = Range(0, 2), Range(2, 3)


def service(at: Frontend, number: int, block: Range) -> ServiceEntry:
    return ServiceEntry(number, NO_FLAGS, 0, block.size, block, Range(block.base, 0))


def write_block(maps: Maps, number: int, block: Range, first: int = 1) -> None:
    """Write backends with ids from ``first`` on; an address's last two bytes are its id."""
    for index in range(block.size):
        id = first + index
        address = IPv4Address(f"10.1.0.{id}")
        maps.slots[block.base + index] = Backend(address, 8080, CLUSTER, id, number)
        maps.backend_slots[id] = block.base + index
        maps.backend_names[id] = BackendName("node-a", f"pod-{id}")


def web() -> Maps:
    """Write the intact service shop/web, id 1, with two frontends and two backends."""
    maps = Maps()
    write_block(maps, 1, OLD)
    maps.service_names[1] = name("web")
    maps.services = {frontend(n): service(frontend(n), 1, OLD) for n in (1, 2)}
    return maps


def restarted(maps: Maps, *ports: DesiredService, damaged: bool = False) -> PlannedNode:
    """Return a new agent on these maps, after its first complete plan."""
    node = PlannedNode()
    node.maps, node.desired = maps, by_name(*ports)
    node.restart(damaged=damaged)
    check_tidy(node)
    return node


def test_members_of_a_block_that_was_never_named() -> None:
    """Ids lead to the used block again; their former slots stay until then."""
    maps = web()
    write_block(maps, 1, NEW)
    contents = maps.read_back()
    assert contents.wrong_backend_slots == [(1, 0), (2, 1)]
    assert contents.leftover_blocks == {Range(2, 1), Range(3, 1)}
    node = restarted(
        maps, desired("a", [3], [7, 8]), desired("web", [1, 2], [1, 2], flags=NO_FLAGS)
    )
    assert node.planner.actual[name("a")].block == Range(4, 2)


def test_member_that_is_nowhere() -> None:
    """A served backend whose entry in backend_slots was removed is found by its id again; netfilter
    translates packets to it from the first plan on.
    """
    maps = web()
    maps.backend_slots[2] = NO_SLOT
    maps.settings[0] = LastIds(1, 2)
    assert maps.read_back().wrong_backend_slots == [(2, 1)]
    node = restarted(maps, desired("web", [1, 2], [1, 2], flags=NO_FLAGS), damaged=True)
    assert node.maps.find(1, 2) == maps.slots[1]


def test_two_ids_with_one_name() -> None:
    """One id is the service's; the other id and its entries are leftovers."""
    maps = web()
    maps.service_names[9] = name("web")
    write_block(maps, 9, NEW, first=5)
    maps.services[frontend(3)] = service(frontend(3), 9, NEW)
    contents = maps.read_back()
    assert contents.entries[name("web")].id == 1
    assert (contents.leftover_service_ids, contents.leftover_services) == ({9}, [frontend(3)])
    assert (contents.leftover_blocks, contents.leftover_backend_ids) == ({NEW}, {5, 6, 7})
    restarted(maps, desired("web", [1, 2, 3], [1, 2], flags=NO_FLAGS))


def test_torn_block() -> None:
    """A block with another service's slot is given up, and written elsewhere."""
    maps = web()
    maps.slots[1] = maps.slots[1]._replace(service=7)
    contents = maps.read_back()
    found = contents.entries[name("web")]
    assert (found.id, found.block, found.backends) == (1, Range(0, 0), ())
    assert (contents.leftover_blocks, contents.leftover_backend_ids) == ({OLD}, {1, 2})


class ReadMaps(Maps):
    """Maps that note which blocks are read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Range] = []

    def read(self, block: Range) -> list[Backend]:
        self.blocks.append(block)
        return super().read(block)


def test_backends_are_made_with_the_plan_of_their_service() -> None:
    """A new agent never holds the former endpoints of all Services: at first it looks at each
    block's owners only.
    """
    maps = ReadMaps()
    write_block(maps, 1, OLD)
    write_block(maps, 2, NEW, first=3)
    maps.service_names |= {1: name("a"), 2: name("web")}
    maps.services = {frontend(n): service(frontend(n), n, [OLD, NEW][n - 1]) for n in (1, 2)}
    planner = Planner(CAPACITY, maps.read_back())
    assert (planner.backends, maps.blocks) == (5, [OLD, NEW])
    planner.plan_changes(by_name(desired("web", [2], [3, 4, 5], flags=NO_FLAGS)), now=0.0)
    assert maps.blocks == [OLD, NEW, NEW]
