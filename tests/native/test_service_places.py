# SPDX-License-Identifier: Apache-2.0
"""Programs read a copy of an entry of map services, and whatever is in it, no wrong one."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import Frontend, Range, ServiceEntry
from ebpflb.kernel.maps.layout import MAPS
from ebpflb.kernel.maps.service_places import PROBES
from tests.native.copies import copy, masks, mixture, packed, services
from tests.native.node import HOST, NativeNode
from tests.publishing import frontend

NewNode = Callable[[], NativeNode]
WEB = "172.30.0.1:80"
OLD, NEW, OTHER = "10.1.0.1:8080", "10.1.0.2:8080", "10.9.0.1:8080"
outside = some.builds(
    Frontend,
    some.ip_addresses().filter(lambda it: not it.is_loopback and int(it)),
    some.integers(1, 65535),
    some.sampled_from([6, 17, 132]),
)


def found(node: NativeNode, key: bytes) -> ServiceEntry | None:
    out = node.kernel.ffi.new("char[]", MAPS["services"].value_size)
    if not node.kernel.run("lookup_service", key, HOST, out, netns=HOST):
        return None
    entry: ServiceEntry = node.kernel.tables["services"].value.unpack(
        bytes(node.kernel.ffi.buffer(out))
    )
    return entry


@given(at=outside, secret=some.integers(0, 2**64 - 1), entry=services, probe=some.integers(0, 7))
def test_programs_look_where_the_agent_writes(
    new_node: NewNode, at: Frontend, secret: int, entry: ServiceEntry, probe: int
) -> None:
    """A copy is found at each of the frontend's places, and behind them it is not."""
    node = new_node()
    node.put("secret", 0, secret)
    key, value = packed(node, at, entry)
    is_there = copy(node, key, value, probe) and probe < PROBES
    assert found(node, key) == (entry if is_there else None)


@given(at=outside, former=services, latter=services, mask=masks, key_mask=masks)
def test_a_half_written_copy_is_not_believed(
    new_node: NewNode,
    at: Frontend,
    former: ServiceEntry,
    latter: ServiceEntry,
    mask: list[bool],
    key_mask: list[bool],
) -> None:
    """While a copy is written, over another one or a free place, the entry of the hash is used, or
    the whole former one.
    """
    node = new_node()
    key, value = packed(node, at, former)
    other, new = packed(node, at._replace(port=at.port ^ 1), latter)
    _, renewed = packed(node, at, latter)
    node.put("services", at, latter)
    for into in (renewed, new, bytes(len(value))):
        copy(node, mixture(key, other, key_mask), mixture(value, into, mask))
        copy(node, key, mixture(value, into, mask))
        assert found(node, key) in (former, latter)


def test_torn_copies_are_no_retries(node: NativeNode) -> None:
    """A connection amid the writing of a copy is translated at once, by the hash."""
    node.publish(1, [WEB], cluster=[NEW])
    key, value = packed(node, frontend(WEB), node.kernel.get("services", frontend(WEB)))
    copy(node, key, value[:40] + bytes(44))
    assert node.socket().connect(WEB).place == NEW
    assert node.counted() == {"translated": 1}


def test_a_former_copy_whose_slots_went_to_another_service(node: NativeNode) -> None:
    """While an agent that knows no copies runs with these programs, what a former copy leads to is
    looked up again in the hash.
    """
    node.publish(1, [WEB], cluster=[OLD])
    node.publish(2, ["172.30.0.2:80"], cluster=[OTHER])
    entry = node.kernel.get("services", frontend(WEB))
    slots = node.kernel.get("services", frontend("172.30.0.2:80")).cluster
    copy(node, *packed(node, frontend(WEB), entry._replace(cluster=slots)))
    assert node.socket().connect(WEB).place == OLD
    assert node.counted() == {"retried": 1, "translated": 1}
    copy(node, *packed(node, frontend(WEB), entry._replace(cluster=Range(5000, 1))))
    assert node.socket().connect(WEB).place == OLD
