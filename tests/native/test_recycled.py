# SPDX-License-Identifier: Apache-2.0
"""A service or slot that is written while it is read is complete in its copy, or not used.

A copy may be any mixture of the words before and after: processors such as arm64's may write and
read them in any order.
"""

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import Backend, Frontend
from ebpflb.kernel.maps import layout, records
from tests.native.copies import flags, masks, mixture, numbers, services
from tests.native.node import POD, NativeNode
from tests.publishing import frontend

NewNode = Callable[[], NativeNode]
WEB = "172.30.0.1:80"
OLD, NEW = "10.1.0.1:8080", "10.1.0.2:8080"

addresses = some.sampled_from(["10.1.0.1", "10.1.0.2", "fd00::1", "fd00::2"]).map(ip_address)
backends = some.builds(
    Backend, addresses, some.integers(1, 65535), flags, numbers, numbers, numbers
)
frontends = some.builds(Frontend, addresses, some.integers(1, 9), some.sampled_from([6, 17]))


def packed(name: str, key: Any, value: Any) -> tuple[bytes, bytes]:
    spec = layout.MAPS[name]
    found = records.codec(spec.key).pack(key)
    return found, layout.check_in(spec).signed(found, records.codec(spec.value).pack(value))


def is_believed(node: NativeNode, what: str, key: bytes, value: bytes) -> bool:
    copy = node.kernel.ffi.new("char[]", len(value))
    return bool(node.kernel.run(f"copy_{what}", key, value, copy, netns=POD))


@given(key=frontends, own=services, other_key=frontends, other=services, mask=masks)
def test_only_whole_services_of_a_frontend_are_believed(
    new_node: NewNode, key: Any, own: Any, other_key: Any, other: Any, mask: list[bool]
) -> None:
    """A value of another frontend, or a half-written value, is not used."""
    check(new_node(), "service", packed("services", key, own), [
        packed("services", other_key, other), packed("services", key, other)
    ], mask)  # fmt: skip


@given(key=numbers, own=backends, other_key=numbers, other=backends, mask=masks)
def test_only_whole_slots_are_believed(
    new_node: NewNode, key: int, own: Any, other_key: int, other: Any, mask: list[bool]
) -> None:
    """A slot that gets another backend while it is read is read as one of the two, or not at
    all.
    """
    check(new_node(), "backend", packed("slots", key, own), [
        packed("slots", other_key, other), packed("slots", key, other)
    ], mask)  # fmt: skip


def check(
    node: NativeNode,
    what: str,
    own: tuple[bytes, bytes],
    others: list[tuple[bytes, bytes]],
    mask: list[bool],
) -> None:
    key, value = own
    assert is_believed(node, what, key, value)
    for other_key, other in others:
        mixed = mixture(value, other, mask)
        whole = [value, other] if other_key == key else [value]
        assert is_believed(node, what, key, mixed) == (mixed in whole)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_service_that_is_half_written_is_read_again(node: NativeNode, protocol: str) -> None:
    """The connection goes to the service's new backend; after two half-written reads it goes
    nowhere.
    """
    node.publish(1, [f"{WEB}/{protocol}"], cluster=[OLD])
    table = node.kernel.tables["services"]
    place = table.lookup(table.key.pack(frontend(f"{WEB}/{protocol}")))
    former = bytes(node.kernel.ffi.buffer(place))
    node.publish(1, [f"{WEB}/{protocol}"], cluster=[NEW])
    place = table.lookup(table.key.pack(frontend(f"{WEB}/{protocol}")))
    latter = bytes(node.kernel.ffi.buffer(place))
    torn = mixture(former, latter, [at < 5 for at in range(21)])
    assert torn not in (former, latter)
    write(node, place, torn)
    node.kernel.meanwhile["services"] = [lambda: None, lambda: write(node, place, latter)]
    assert node.socket(protocol).connect(WEB).place == NEW
    assert node.counted() == {"retried": 1, "translated": 1}
    write(node, place, torn)
    assert node.socket(protocol).connect(WEB).place != NEW
    assert node.counted() == {"retried": 2, "translated": 1, "recycled": 1}


def test_a_slot_that_is_half_written_is_read_again(node: NativeNode) -> None:
    """A half-written slot is read again, even if it names the service."""
    node.publish(1, [WEB], cluster=[OLD])
    table = node.kernel.tables["slots"]
    service = node.kernel.get("services", frontend(WEB))
    place = table.lookup(table.key.pack(service.cluster.base))
    right = bytes(node.kernel.ffi.buffer(place))
    torn = ip_address("fd00::9").packed[:8] + right[8:]
    write(node, place, torn)
    node.kernel.meanwhile["slots"] = [lambda: None, lambda: write(node, place, right)]
    assert node.socket().connect(WEB).place == OLD
    assert node.counted() == {"retried": 1, "translated": 1}


def write(node: NativeNode, place: Any, value: bytes) -> None:
    node.kernel.ffi.memmove(place, value, len(value))
