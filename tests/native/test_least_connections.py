# SPDX-License-Identifier: Apache-2.0
"""Sockets of services with the scheduler least-connections: each is counted while it is open."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import Choice, Range
from ebpflb.plan.tables import ALWAYS
from tests.native.node import TCP, NativeNode, Socket
from tests.publishing import frontend

LEAST, OTHER, RANDOM = "172.30.0.1:80", "172.30.0.2:80", "172.30.0.3:80"
NOBODY = "192.0.2.9:80"
BACKENDS = ["10.1.0.1:8080", "10.1.0.2:8080", "10.1.0.3:8080"]
WORD = "least_connections"


def served(node: NativeNode, count: int = 3) -> NativeNode:
    for number, (where, word) in enumerate({LEAST: WORD, OTHER: WORD, RANDOM: ""}.items(), 1):
        frontends = {where: word, f"{where}/udp": word}
        node.publish(number, frontends, cluster=BACKENDS[:count])
    return node


def load(node: NativeNode, service: int, backend: str) -> int:
    found = node.kernel.get("backend_loads", node.backend_id(service, backend))
    return int(found.open) if found else 0


def counted(node: NativeNode) -> dict[int, int]:
    """Return the nonzero counts by backend id."""
    loads = node.kernel.items("backend_loads").items()
    return {id: found.open for id, found in loads if found.open}


def held(node: NativeNode) -> dict[int, int]:
    """Return how many elements name each backend id; for stream sockets, how many entries do."""
    streams = (each for each in node.kernel.sockets().values() if is_counted_stream(each))
    named = [each.backend for each in node.kernel.items("connections").values()]
    return dict(Counter([*named, *(each.peer.backend for each in streams)]))


def is_counted_stream(entry: Any) -> bool:
    return bool(entry.counted and entry.peer.frontend.protocol == TCP)


def uncounted(node: NativeNode) -> int:
    return sum(found.uncounted for found in node.kernel.items("backend_loads").values())


def set_loads(node: NativeNode, open_: dict[str, int]) -> None:
    for backend, count in open_.items():
        id = node.backend_id(1, backend)
        node.put("backend_loads", id, node.kernel.get("backend_loads", id)._replace(open=count))


@given(
    backends=some.lists(
        some.tuples(some.integers(0, 50), some.integers(0, 1000)), min_size=1, max_size=8
    ),
    first=some.integers(0, 7),
)
def test_of_a_short_list_the_least_loaded_for_its_weight_is_chosen(
    new_node: Callable[[], NativeNode], backends: list[tuple[int, int]], first: int
) -> None:
    """Of equal ones the drawn one; a backend without a weight is never drawn, and never chosen."""
    node, drawn = new_node(), first % len(backends)
    backends[drawn] = backends[drawn][0], 100
    places = [f"10.2.0.1:{number}" for number in range(1, len(backends) + 1)]
    node.publish(1, {LEAST: WORD}, cluster=places)
    set_loads(node, {place: count for place, (count, _) in zip(places, backends, strict=True)})
    service = node.kernel.get("services", frontend(LEAST))
    base = service.cluster.base
    for slot, (_, weight) in enumerate(backends, base):
        node.put("slots", slot, node.kernel.get("slots", slot)._replace(weight=weight))
    node.put("choices", 0, Choice(base + drawn, base + drawn, ALWAYS))
    node.put("services", frontend(LEAST), service._replace(table=Range(0, 1)))
    shares = [Fraction(count, weight) if weight else inf for count, weight in backends]
    chosen = places.index(node.socket().connect(LEAST).place)
    assert shares[chosen] == min(shares)
    assert chosen == drawn or shares[chosen] < shares[drawn]


def test_of_a_long_list_eight_draws_are_compared(node: NativeNode) -> None:
    """So the one backend of 24 without a connection is met by a third to a quarter of the draws."""
    places = [f"10.2.0.1:{number}" for number in range(1, 25)]
    node.publish(1, {LEAST: WORD}, cluster=places)
    idle, chosen = places[-1], 0
    for number in range(400):
        set_loads(node, {place: 5 * (place != idle) for place in places})
        node.kernel.dice = partial(int, number * (2**32 // 400))
        chosen += node.socket().connect(LEAST).place == idle
    assert 0.2 < chosen / 400 < 0.4  # 1 - (23 / 24) ** 8 is 0.29; two draws give 0.08


@pytest.mark.parametrize(
    ("protocol", "full"), [("tcp", "sockets"), ("udp", "sockets"), ("udp", "connections")]
)
def test_a_full_map_costs_the_count_alone(node: NativeNode, protocol: str, full: str) -> None:
    """The connection is made, but only counted as uncounted."""
    served(node)
    node.kernel.take_places()
    node.kernel.full.add(full)
    first = node.socket(protocol)
    where = first.connect(LEAST).place
    assert where in BACKENDS
    assert not counted(node)
    assert uncounted(node) == 1
    node.kernel.full.clear()
    first.release()
    assert not counted(node)
    assert not held(node)


def test_a_stream_needs_no_element_of_its_own(node: NativeNode) -> None:
    """A stream's connection is counted by its entry in `sockets`, even if `connections` is full."""
    served(node)
    node.kernel.full.add("connections")
    one = node.socket()
    for to in (LEAST, OTHER, LEAST):
        one.connect(to)
        assert sum(counted(node).values()) == 1
        assert counted(node) == held(node)
    assert not uncounted(node)
    one.release()
    assert not counted(node)


def test_a_full_table_that_empties_counts_again(node: NativeNode) -> None:
    """A remembered stream connects again while the table is full, and once more when there is
    room.
    """
    served(node)
    node.kernel.take_places()
    one = node.socket()
    one.connect(LEAST)
    node.kernel.full.add("sockets")
    one.connect(OTHER)
    assert not counted(node)
    assert uncounted(node) == 1
    node.kernel.full.clear()
    one.connect(LEAST)
    assert counted(node) == held(node)
    assert sum(counted(node).values()) == 1
    one.release()
    assert not counted(node)


def test_what_a_removed_backend_has_is_none_of_the_next_with_its_id(node: NativeNode) -> None:
    """A connection of a removed backend does not count for a later backend with the same id."""
    served(node, 1)
    old, new = node.socket(), node.socket()
    old.connect(LEAST)
    id = node.backend_id(1, BACKENDS[0])
    load_now = node.kernel.get("backend_loads", id)
    node.put("backend_loads", id, load_now._replace(open=0, generation=load_now.generation + 1))
    new.connect(LEAST)
    old.release()
    assert counted(node) == {id: 1}
    new.release()
    assert not counted(node)
    assert not held(node)


actions = some.tuples(
    some.integers(0, 5),
    some.sampled_from(["connect", "sendmsg", "release", "disconnect"]),
    some.sampled_from([LEAST, OTHER, RANDOM, NOBODY]),
)


@given(steps=some.lists(actions, max_size=40))
def test_counts_are_the_open_connections_after_any_sequence(
    new_node: Callable[[], NativeNode], steps: list[tuple[int, str, str]]
) -> None:
    """Counts equal the number of open connections after any sequence.

    A stream socket has one connection, and a datagram socket one for each frontend, until it
    connects elsewhere or is released.
    """
    node = served(new_node())
    sockets = [node.socket("tcp" if number < 3 else "udp") for number in range(6)]
    model: dict[tuple[int, str], int] = {}
    for number, what, to in steps:
        each = sockets[number]
        step(node, model, number, each, what, to)
        assert counted(node) == held(node) == dict(Counter(model.values()))
    for each in sockets:
        each.release()
    assert not counted(node)
    assert not held(node)


def step(
    node: NativeNode,
    model: dict[tuple[int, str], int],
    number: int,
    each: Socket,
    what: str,
    to: str,
) -> None:
    own = [key for key in model if key[0] == number]
    is_stream = number < 3
    if what == "release" or (what == "connect" and (is_stream or to == NOBODY)):
        for key in own:
            del model[key]
    if what == "release":
        each.release()
    elif what == "disconnect":
        each.disconnect()
    elif what == "connect" or not is_stream:
        where = (each.connect if what == "connect" else each.sendmsg)(to).place
        if to in (LEAST, OTHER):
            service = (LEAST, OTHER).index(to) + 1
            key = (number, "" if is_stream else to)
            model[key] = node.backend_id(service, where)
