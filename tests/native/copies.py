# SPDX-License-Identifier: Apache-2.0
"""Entries of services, mixtures of two of them, and the copies that programs read."""

from typing import Any

from hypothesis import strategies as some

from ebpflb.entries.services import Frontend, Range, ServiceEntry
from ebpflb.kernel.maps.layout import MAPS
from ebpflb.kernel.maps.service_places import first_place
from tests.native.node import NativeNode
from tests.publishing import frontend

ENTRIES = MAPS["service_places"].entries

numbers = some.integers(0, 9)
flags = some.frozensets(some.sampled_from(["local"]))
ranges = some.builds(Range, numbers, numbers)
none = some.just(())  # what a copy has behind the check is not believed
services = some.builds(ServiceEntry, numbers, flags, numbers, numbers, ranges, ranges, ranges, none)
masks = some.lists(some.booleans(), min_size=21, max_size=21)


def mixture(own: bytes, foreign: bytes, mask: list[bool]) -> bytes:
    """Return a mixture of the words of both."""
    places = range(0, len(own), 4)
    words = ((foreign if mask[at // 4] else own)[at : at + 4] for at in places)
    return b"".join(words)


def packed(node: NativeNode, at: Frontend, entry: ServiceEntry) -> tuple[bytes, bytes]:
    table = node.kernel.tables["services"]
    key = table.key.pack(at)
    return key, table.check.signed(key, table.value.pack(entry))


def copy(node: NativeNode, key: bytes, value: bytes, probe: int = 0) -> Any:
    """Write a copy at one of the frontend's places, and return it."""
    node.settings(service_places=ENTRIES)
    at = first_place(key, node.kernel.get("secret", 0), ENTRIES) + probe
    place = node.kernel.tables["service_places"].lookup(at.to_bytes(4, "little"))
    if place:
        node.kernel.ffi.memmove(place, key + bytes(4) + value, 24 + len(value))
    return place


def copy_entry(node: NativeNode, text: str) -> None:
    """Write the copy of a frontend's entry."""
    at = frontend(text)
    copy(node, *packed(node, at, node.kernel.get("services", at)))
