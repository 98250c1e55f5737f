# SPDX-License-Identifier: Apache-2.0
"""The flowtable and its rules as the kernel has them, in a namespace of the test's own."""

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from ebpflb.kernel.netfilter import flowtable, nft
from ebpflb.kernel.netfilter.flowtable import TABLE, Contents, flowtable_obstacle
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run
from tests.kit import needs

NAME = f"ebpflb-test-{os.getpid()}-flowtable"
ENOUGH = 'ct packets & 4294967280 != 0/32 goto long comment "ebpflb: from packet 16 on"'
RULE = (
    "ct status seen-reply,dnat / seen-reply,dnat ct original {ip} daddr ."
    " ct protocol . ct original proto-dst @{set} flow add @fast-forward"
    ' comment "ebpflb: connections to {set}"'
)
WEB = flowtable.element(ip_address("10.96.0.10").packed, 6, 80)
DNS = flowtable.element(ip_address("fd00:96::10").packed, 17, 53)
EMPTY = Contents({}, frozenset())


def with_frontends(*elements: bytes) -> Contents:
    return EMPTY._replace(frontends=frozenset(elements))


def indexes(*names: str) -> dict[str, int]:
    return {name: socket.if_nametoindex(name) for name in names}


def test_the_obstacle_is_found_without_a_trace() -> None:
    """The probe leaves nothing in this namespace, whether the kernel has flowtables or not."""
    with nodes.fresh(NAME):
        obstacle = flowtable_obstacle()
        assert obstacle is None or "the kernel can make no flowtable" in obstacle
        assert not nft.tables()


@pytest.fixture
def made() -> Iterator[None]:
    """Return a flowtable and two devices."""
    needs.flowtable()
    with nodes.fresh(NAME):
        flowtable.write(TABLE, EMPTY)
        run("ip", "link", "add", "up0", "type", "veth", "peer", "name", "up1")
        yield


@pytest.mark.usefixtures("made")
def test_answered_connections_enter_the_flowtable() -> None:
    """Answered and translated connections to a frontend enter the flowtable, after all filters."""
    flowtable.write(TABLE, with_frontends(WEB, DNS))
    said = run("nft", "list", "table", *TABLE)
    assert ENOUGH in said
    for ip, name in (("ip", "frontends-v4"), ("ip6", "frontends-v6")):
        assert RULE.format(ip=ip, set=name) in said
    assert "type filter hook forward priority 300; policy accept;" in said
    assert "elements = { 10.96.0.10 . tcp . 80 }" in said
    assert "elements = { fd00:96::10 . udp . 53 }" in said


@pytest.mark.usefixtures("made")
def test_a_change_adds_and_removes() -> None:
    """A change adds devices, and adds and removes frontends; a missing device changes nothing."""
    both = indexes("up0", "up1")
    flowtable.change(TABLE, EMPTY, wanted := Contents(both, frozenset({WEB, DNS})))
    assert flowtable.read(TABLE) == wanted
    with pytest.raises(nft.Refused):
        flowtable.change(TABLE, wanted, Contents({**both, "none0": 99}, frozenset({WEB})))
    assert flowtable.read(TABLE) == wanted
    flowtable.change(TABLE, wanted, fewer := Contents(both, frozenset({WEB})))
    assert flowtable.read(TABLE) == fewer
    flowtable.write(TABLE, only := Contents(indexes("up1"), frozenset({DNS})))
    assert flowtable.read(TABLE) == only
    run("ip", "link", "delete", "up0")
    assert flowtable.read(TABLE) == Contents({}, frozenset({DNS}))


@pytest.mark.usefixtures("made")
def test_more_than_one_message_is_written() -> None:
    """Frontends and devices that exceed one netlink message are written completely, also in a
    change.
    """
    names = [f"d{number}" for number in range(300)]
    run("ip", "-batch", "-", said="".join(f"link add {name} type dummy\n" for name in names))
    frontends = (flowtable.element(n.to_bytes(4, "big"), 6, 80) for n in range(3000))
    many = Contents(indexes(*names), frozenset(frontends))
    flowtable.change(TABLE, EMPTY, many)
    assert flowtable.read(TABLE) == many
    flowtable.write(TABLE, many)
    assert flowtable.read(TABLE) == many


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("words", ["flush chain", "delete chain"])
def test_what_was_changed_is_not_whole(words: str) -> None:
    """A flowtable that another program changed is written again."""
    run("nft", *words.split(), *TABLE, flowtable.CHAIN)
    assert flowtable.read(TABLE) is None
    flowtable.write(TABLE, EMPTY)
    assert flowtable.read(TABLE) == EMPTY
