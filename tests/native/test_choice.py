# SPDX-License-Identifier: Apache-2.0
"""Every backend of a list is equally likely, and no other is chosen."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import Backend, Range
from tests.native.node import NativeNode
from tests.publishing import frontend, place

WEB = "172.30.0.1:80"
HIGHEST = 0xFFFFFFFF


def publish_sized(node: NativeNode, base: int, size: int) -> None:
    """Publish a service with a list of any size, of which only the first and last slot are
    written.
    """
    node.publish(1, [WEB], cluster=["10.1.0.1:8080"])
    entry = node.kernel.get("services", frontend(WEB))
    node.kernel.put("services", frontend(WEB), entry._replace(cluster=Range(base, size)))
    for slot, host in ((base, "10.1.0.1"), (base + size - 1, "10.1.0.2")):
        backend = Backend(*place(f"{host}:8080"), frozenset({"cluster"}), slot + 1, 1)
        node.kernel.put("slots", slot, backend)


@pytest.mark.parametrize("base", [0, 1, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 255, 256, 1000, 65_535, 65_536, 500_000])
def test_extreme_numbers_give_the_ends(node: NativeNode, base: int, size: int) -> None:
    """The lowest random number gives the first slot of the list, the highest the last."""
    publish_sized(node, base, size)
    node.kernel.dice = lambda: 0
    first = "10.1.0.1:8080" if size > 1 else "10.1.0.2:8080"
    assert node.socket().connect(WEB).place == first
    node.kernel.dice = lambda: HIGHEST
    assert node.socket().connect(WEB).place == "10.1.0.2:8080"
    assert node.counted() == {"translated": 2}


def chosen(node: NativeNode, size: int, number: int) -> int:
    node.kernel.dice = lambda: number
    return int(node.socket().connect(WEB).place.rpartition(":")[2]) - 1


@given(size=some.integers(1, 300), number=some.integers(0, HIGHEST))
def test_a_random_number_is_scaled_to_the_list(
    new_node: Callable[[], NativeNode], size: int, number: int
) -> None:
    """Any random number is scaled to the list, rounded down."""
    node = new_node()
    node.publish(1, [WEB], cluster=[f"10.1.0.1:{n + 1}" for n in range(size)])
    assert chosen(node, size, number) == number * size // (HIGHEST + 1)
