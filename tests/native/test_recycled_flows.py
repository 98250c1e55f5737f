# SPDX-License-Identifier: Apache-2.0
"""A flow entry that gets another tuple while it is read is not used."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.flows import Flow, FlowKind, Tuple
from ebpflb.kernel.maps import layout, records
from tests.native.node import POD, NativeNode

NewNode = Callable[[], NativeNode]
TUPLE, FLOW = records.record("struct tuple"), records.record("struct flow")
PACKET = records.record("struct packet")
CHECK = layout.check_in(layout.MAPS["other_flows"])
WORDS = layout.MAPS["other_flows"].value_size // 4

addresses = some.sampled_from(["10.1.0.1", "10.1.0.2", "192.0.2.1", "fd00::1", "fd00::2"]).map(
    ip_address
)
ports = some.integers(1, 65535)
numbers = some.integers(0, 9)
keys = some.builds(
    Tuple, addresses, addresses, ports, ports, some.sampled_from([6, 17]), some.integers(1, 2)
)
flows = some.tuples(
    *(numbers, numbers, addresses, ports, ports, numbers, numbers, numbers),
    some.sampled_from(FlowKind),
    some.just(frozenset[str]()),
).map(lambda fields: Flow(*fields))
CLIENT, OTHER_CLIENT = ip_address("192.0.2.1"), ip_address("192.0.2.2")
FRONTEND, BACKEND, STRANGER = map(ip_address, ("172.30.0.1", "10.1.0.1", "10.1.0.9"))
REQUEST = Tuple(CLIENT, FRONTEND, 40_000, 53, 17, 1)
ENTRY = Flow(7, 0, BACKEND, 5353, 40_000, 1, 1, 0, FlowKind.DNAT, frozenset({"request", "seen"}))
OTHER = REQUEST._replace(source=OTHER_CLIENT)
OTHER_ENTRY = ENTRY._replace(address=STRANGER, frontend_moves=5, last_seen=5)


def signed(key: Tuple, flow: Flow) -> bytes:
    return CHECK.signed(TUPLE.pack(key), FLOW.pack(flow))


def believed(node: NativeNode, key: Tuple, entry: bytes) -> bytes | None:
    """Return the copy of an entry, if the copy is valid for this tuple."""
    copy = node.kernel.ffi.new("char[]", len(entry))
    found = node.kernel.run("copy_entry", TUPLE.pack(key), entry, copy, netns=POD)
    return bytes(node.kernel.ffi.buffer(copy)) if found else None


def translation(packed: bytes) -> tuple[object, ...]:
    return tuple(FLOW.unpack(packed)[: FLOW.cls._fields.index("flags")])


@given(
    key=keys, flow=flows, other_key=keys, other=flows,
    mask=some.lists(some.booleans(), min_size=WORDS, max_size=WORDS),
)  # fmt: skip
def test_only_whole_entries_of_a_tuple_are_believed(
    new_node: NewNode, key: Tuple, flow: Flow, other_key: Tuple, other: Flow, mask: list[bool]
) -> None:
    """A copy that mixes the words of two entries is not used, in whatever order they were read."""
    node = new_node()
    own, foreign = signed(key, flow), signed(other_key, other)
    assert believed(node, key, own) == own
    if key != other_key:
        assert believed(node, key, foreign) is None
    words = [(foreign if other else own)[at * 4 :][:4] for at, other in enumerate(mask)]
    mixed = b"".join(words)
    allowed = [own, foreign] if key == other_key else [own]
    if believed(node, key, mixed):
        assert translation(mixed) in map(translation, allowed)


@pytest.mark.parametrize("field", FLOW.cls._fields)
def test_a_changed_field_is_noticed_unless_packets_change_it(new_node: NewNode, field: str) -> None:
    """A change of any field that decides about a packet is noticed; fields that packets change are
    left out.
    """
    entry = signed(REQUEST, ENTRY)
    at = layout.ffi.offsetof("struct flow", field)
    changed = entry[:at] + bytes([entry[at] ^ 1]) + entry[at + 1 :]
    is_noticed = believed(new_node(), REQUEST, changed) is None
    assert is_noticed == (translation(changed) != translation(entry))


def test_a_reader_beside_a_writer_believes_no_other_entry(new_node: NewNode) -> None:
    """A reader never uses another tuple's entry while a writer changes entries.

    One thread gives an entry to two tuples in turns, as fast as it can, and another thread reads
    it.
    """
    node = new_node()
    ffi, lib = node.kernel.ffi, node.kernel.lib
    own, foreign = signed(REQUEST, ENTRY), signed(OTHER, OTHER_ENTRY)
    place, wrong = ffi.new("char[]", own), ffi.new("char[]", len(own))
    rounds = 2_000_000
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(lib.write_in_turns, place, own, foreign, len(own), rounds)
        seen = lib.read_often(TUPLE.pack(REQUEST), place, own, wrong, rounds)
        writing.result()
    assert seen >= 0, bytes(ffi.buffer(wrong)).hex()
    assert seen > 0


def packet(key: Tuple) -> bytes:
    fields: dict[str, Any] = dict.fromkeys(PACKET.cls._fields, 0)
    fields |= {"tuple": key, "opens": 1}
    return PACKET.pack(PACKET.cls(**fields))


def test_an_entry_that_is_recycled_after_its_copy_is_not_written(node: NativeNode) -> None:
    """The packet goes where its own entry led; the other flow's entry stays unchanged."""
    settings = node.kernel.get("settings", 0)
    node.put("settings", 0, settings._replace(frontend_moves=3))
    node.publish(1, ["172.30.0.1:53/udp"], cluster=["10.1.0.1:5353"])
    node.put("other_flows", REQUEST, ENTRY)
    place = node.kernel.tables["other_flows"].places[TUPLE.pack(REQUEST)]
    after = signed(OTHER, OTHER_ENTRY)
    node.kernel.meanwhile["services"] = [lambda: node.kernel.ffi.memmove(place, after, len(after))]
    to = node.kernel.ffi.new("char[]", TUPLE.struct.size)
    assert node.kernel.run("follow_packet", packet(REQUEST), to, netns=POD)
    assert TUPLE.unpack(bytes(node.kernel.ffi.buffer(to))).destination == BACKEND
    assert bytes(node.kernel.ffi.buffer(place)) == after


def test_an_entry_that_remains_is_written(node: NativeNode) -> None:
    """The program writes the time of last use, and that the frontend still belongs to its
    service.
    """
    settings = node.kernel.get("settings", 0)
    node.put("settings", 0, settings._replace(frontend_moves=3))
    node.publish(1, ["172.30.0.1:53/udp"], cluster=["10.1.0.1:5353"])
    node.put("other_flows", REQUEST, ENTRY)
    to = node.kernel.ffi.new("char[]", TUPLE.struct.size)
    assert node.kernel.run("follow_packet", packet(REQUEST), to, netns=POD)
    noted = node.kernel.get("other_flows", REQUEST)
    assert (noted.frontend_moves, noted.last_seen) == (3, node.kernel.now)
