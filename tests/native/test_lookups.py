# SPDX-License-Identifier: Apache-2.0
"""The look-ups that kernel/stale.py repeats in Python give the answers of the C code."""

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import Frontend, Range, ServiceEntry
from ebpflb.kernel import stale
from ebpflb.kernel.map_writer import bit_of
from ebpflb.kernel.maps import layout
from tests.native.kernel import Kernel
from tests.native.node import HOST, POD, NativeNode
from tests.publishing import frontend, place

WEB = "172.30.0.1:53/udp"
DRAWS = 8  # evenly spread they meet each of up to 6 backends

NewNode = Callable[[], NativeNode]

V4 = ("172.30.0.1", "192.0.2.1", "192.0.2.2", "127.0.0.1", "127.1.2.3", "0.0.0.0")
V6 = ("fd00:30::1", "2001:db8::1", "2001:db8::2", "::1", "::")
addresses = some.sampled_from((*V4, *V6)).map(ip_address)
frontends = some.builds(
    Frontend, addresses, some.sampled_from([53, 30053]), some.sampled_from([6, 17])
)
everywhere = some.builds(
    Frontend, some.ip_addresses(), some.integers(1, 65535), some.sampled_from([6, 17, 132])
)


class View:
    """A map of the native kernel, as the agent reads it."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel, self.spec = kernel, layout.MAPS[name]

    def get(self, key: Any) -> Any:
        return self.kernel.get(self.spec.name, key)


def views(node: NativeNode) -> Any:
    return {name: View(node.kernel, name) for name in layout.MAPS}


def call(node: NativeNode, function: str, *arguments: Any, found: str) -> Any:
    """Return the entry of the map ``found`` that the C look-up finds, or None."""
    kernel = node.kernel
    codec = kernel.tables[found].value
    out = kernel.ffi.new("char[]", layout.MAPS[found].value_size)
    if not kernel.run(function, *arguments, out, netns=HOST):
        return None
    return codec.unpack(bytes(kernel.ffi.buffer(out)))


@given(
    served=some.dictionaries(frontends, some.integers(1, 99), max_size=12),
    owned=some.sets(addresses),
    asked=some.lists(frontends, min_size=1, max_size=12),
)
def test_service_find(
    new_node: NewNode, served: dict[Frontend, int], owned: set[Any], asked: list[Frontend]
) -> None:
    """C and Python agree on exact frontends, NodePorts at the node's addresses and loopback, and on
    no frontend.
    """
    node = new_node()
    node.owns(*map(str, owned))
    for at, id in served.items():
        block = Range(id, 1)
        node.put("services", at, ServiceEntry(id, frozenset(), 0, 1, block, block))
    for at in (*asked, *served):
        key = node.kernel.tables["services"].key.pack(at)
        expected = call(node, "lookup_service", key, HOST, found="services")
        assert stale.service_find(views(node), at) == expected


@given(
    served=some.sets(frontends, max_size=12),
    asked=some.lists((frontends | everywhere).filter(lambda it: int(it.address)), min_size=1),
)
def test_where_no_frontend_is(
    new_node: NewNode, served: set[Frontend], asked: list[Frontend]
) -> None:
    """C reads exactly the bits that the agent clears for each frontend."""
    node, bits = new_node(), {bit_of(each) for each in served}
    for at in asked:
        own = at._replace(address=ip_address("::"))
        for bit in (bit_of(at), bit_of(own)):
            word = 2**64 - 1 - sum(1 << each % 64 for each in bits if each // 64 == bit // 64)
            node.put("no_frontends", bit // 64, word)
        key = node.kernel.tables["services"].key.pack(at)
        expected = bit_of(at) in bits or bit_of(own) in bits
        assert bool(node.kernel.run("may_exist", key, netns=HOST)) == expected


@given(
    flags=some.sets(some.sampled_from(["local", "external"])),
    cluster=some.sets(some.integers(1, 6)),
    local=some.sets(some.integers(1, 6)),
    leaving=some.sets(some.integers(7, 9)),
)
def test_socket_range(
    new_node: NewNode, flags: set[str], cluster: set[int], local: set[int], leaving: set[int]
) -> None:
    """The result is the range of slots from which a connect hook gives sockets their backends."""
    node = new_node()
    lists = [[f"10.1.0.{n}:5353" for n in sorted(each)] for each in (cluster, local, leaving)]
    node.publish(1, {WEB: " ".join(flags)}, cluster=lists[0], local=lists[1], leaving=lists[2])
    service = stale.service_find(views(node), frontend(WEB))
    assert service
    given = stale.socket_range(service)
    slots = views(node)["slots"]
    backends = [slots.get(slot) for slot in range(given.base, given.base + given.size)]
    allowed = {(each.address, each.port) for each in backends}
    assert given_to_sockets(node) == allowed


def given_to_sockets(node: NativeNode) -> set[Any]:
    """Return the backends that evenly spread random numbers choose; none if all are refused."""
    places = set()
    for number in range(DRAWS):
        node.kernel.dice = lambda number=number: (number << 32) // DRAWS  # type: ignore[misc]
        places.add(place(node.socket("udp", netns=POD).connect(WEB.partition("/")[0]).place))
    translated = node.counted().get("translated", 0)
    assert translated in (0, DRAWS)
    return places if translated else set()
