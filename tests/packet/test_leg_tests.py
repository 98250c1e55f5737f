# SPDX-License-Identifier: Apache-2.0
"""A question by which another node tests the legs of a hand-over is answered; nothing else is."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyroute2 import netns

from ebpflb.agent.hand_over_test import HandOverTest, View
from ebpflb.kernel.attach import clsact
from ebpflb.kernel.handing import AddressBits, bit_of
from ebpflb.kernel.maps.layout import HANDED
from ebpflb.kernel.node.device_watch import list_devices
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.loader import PASS, REDIRECT
from ebpflb.kernel.programs.precompile import HAND_OVER
from ebpflb.kernel.segment import ANSWER, question
from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import Namespace
from ebpflb.model.addresses import Family, family, parse_address
from ebpflb.model.devices import Device
from tests.kernel.node import nodes
from tests.kit import needs, once
from tests.packet.conftest import loaded

ASKER, HERE = bytes([2, 0, 0, 0, 0, 1]), bytes(6)  # HERE: loopback's
ADDRESSES = [("198.51.100.7", "192.0.2.200"), ("2001:db8:1::7", "2001:db8::200")]


@pytest.fixture(scope="module")
def program(shared: Path, cache: Path) -> Iterator[int]:
    with once.alone(shared):
        compiled = compiler.compile_source(HAND_OVER, cache=cache)
    with loaded(compiled, **HANDED) as (maps, hooks):
        bits = AddressBits(maps["handed_addresses"])
        bits.flip(bit_of(parse_address(it)) for _, it in ADDRESSES)  # they may have frontends
        yield hooks["hand_over"]


def asked(
    pair: tuple[str, str] = ADDRESSES[0],
    *,
    to: bytes = HERE,
    by: bytes = ASKER,
    change: tuple[int, int] = (0, 0),
) -> bytes:
    """``change``: an offset, and what the byte there is."""
    client, address = map(parse_address, pair)
    frame = question(to, by, client, address, b"the mark")
    at, value = change
    return frame[:at] + bytes([value]) + frame[at + 1 :] if at else frame


@pytest.mark.parametrize("pair", ADDRESSES)
def test_a_question_becomes_its_answer(program: int, pair: tuple[str, str]) -> None:
    """Addresses are exchanged, the length is the same, and the checksums are right."""
    frame = asked(pair)
    done = loader.run_program(program, frame)
    expected = bytearray(asked((pair[1], pair[0]), to=ASKER, by=HERE))
    icmp = len(frame) - 12
    expected[icmp + 1] = ANSWER
    expected[icmp + 3] -= 1
    assert (done.retval, done.packet) == (REDIRECT, bytes(expected))


def test_everything_else_goes_on_unchanged(program: int) -> None:
    """What a router has forwarded, what is for others or from a group, an answer, long frames."""
    v4, v6 = ADDRESSES
    for frame in (
        asked(change=(22, 2)),  # TTL
        asked(v6, change=(21, 2)),
        asked(change=(23, 17)),
        asked(v6, change=(20, 17)),
        asked(change=(34, 8)),  # type
        asked(v6, change=(54, 128)),
        asked(change=(35, ANSWER)),
        asked(v6, change=(55, ANSWER)),
        asked(change=(14, 0x46)),
        asked(to=bytes([2, 0, 0, 0, 0, 7])),  # a switch has flooded it
        asked(to=b"\xff" * 6),
        asked(v4, by=b"\x01\0\x5e\0\0\1"),
        asked() + bytes(128),
        *(asked()[:length] for length in (34, 36)),
    ):
        done = loader.run_program(program, frame)
        assert done.retval == PASS and done.packet == frame, frame.hex()


class Side:
    """A namespace at one end of a cable; its eth0 is of a kind."""

    def __init__(self, number: int) -> None:
        self.host = Namespace(f"ebpflb-leg-{os.getpid()}-{number}")
        self.v4, self.v6 = (parse_address(f"{net}{number}") for net in ("192.0.2.", "fd02::"))

    def build(self, kind: str) -> None:
        made = "link add eth0 " + KINDS[kind] if KINDS[kind] else "link set p0 name eth0"
        joined = ["link set p0 master eth0"] if kind in ("bridge", "bond") else []
        self.host.ip(made, *joined, *[] if kind == "ethernet" else ["link set p0 up"])
        self.host.ip("link set eth0 up", f"address add {self.v4}/24 dev eth0")
        self.host.ip(f"address add {self.v6}/64 dev eth0")

    @property
    def uplink(self) -> Device:
        """As the agent sees it, once it has a link-local address."""
        with nodes.entered(self.host.netns):
            found = (it for it in list_devices().devices if it.name == "eth0")
            return next(found)

    def is_up(self) -> bool:
        return any(it.is_link_local for it in self.uplink.addresses)


KINDS = {
    "ethernet": "",
    "bridge": "type bridge",
    "vlan": "link p0 type vlan id 5",
    "bond": "type bond mode 1",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_neighbour_at_an_uplink(program: int, kind: str) -> None:
    """Of each kind that this kernel has, in both families."""
    one, two = Side(1), Side(2)
    with ExitStack() as opened:
        for side in (one, two):
            side.host.create()
            opened.callback(netns.remove, side.host.netns)
        one.host.ip(f"link add p0 type veth peer name p0 netns {two.host.netns}")
        with needs.devices():
            for side in (one, two):
                side.build(kind)
        wait_until("both are up", lambda: one.is_up() and two.is_up(), 10)
        with nodes.entered(two.host.netns), clsact.open_kernel() as kernel:
            clsact.add_qdisc(kernel, two.uplink.index)
            clsact.put_filter(kernel, two.uplink.index, "ingress", 1, program, "test")
        here: Any = SimpleNamespace(put=lambda call: call.answer())
        test, uplink = HandOverTest(here, here, here, asked=True), one.uplink
        test.view = View(
            {"two": (two.v4, two.v6)},
            {Family.IPV4: one.v4, Family.IPV6: one.v6},
            {uplink.index: uplink},
            {family(it): it for pair in ADDRESSES for it in [parse_address(pair[1])]},
        )
        test.is_new = False
        with nodes.entered(one.host.netns):
            test.turn()
        assert test.hops and not test.hops.blocked
        assert [hop.address for hop in test.hops.believed] == [two.v4, two.v6]
        assert test.hops.macs == {bytes.fromhex(two.uplink.mac.replace(":", ""))}
