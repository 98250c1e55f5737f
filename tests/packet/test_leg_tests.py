# SPDX-License-Identifier: Apache-2.0
"""A question by which another node tests the legs of a hand-over is answered; nothing else is."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.kernel.handing import AddressBits, bit_of
from ebpflb.kernel.maps.layout import HANDED
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.loader import PASS, REDIRECT
from ebpflb.kernel.programs.precompile import HAND_OVER
from ebpflb.kernel.segment import ANSWER, question
from ebpflb.model.addresses import parse_address
from tests.kit import once
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
