# SPDX-License-Identifier: Apache-2.0
"""How --packet-mark is written."""

import pytest

from ebpflb.model import packet_path
from ebpflb.model.packet_path import PacketMark


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("", packet_path.OFF),
        ("0x4000/0x4000", PacketMark(0x4000, 0x4000)),
        ("16384/0xffff", PacketMark(0x4000, 0xFFFF)),
        ("1", PacketMark(1, 0xFFFFFFFF)),
        ("1/1", PacketMark(1, 1)),
    ],
)
def test_forms(text: str, mark: PacketMark) -> None:
    """MARK/MASK in any base, or MARK alone, as iptables reads it; it is shown in one form."""
    assert packet_path.parse_mark(text) == mark
    assert packet_path.parse_mark(str(mark)) == mark


@pytest.mark.parametrize("text", ["x", "1/", "/1", "2/1", "0/1", "0x100000000", "-1", "1/0"])
def test_refused(text: str) -> None:
    """A mark that is no bits of its mask, or none at all."""
    with pytest.raises(ValueError, match=r"MARK/MASK|MARK must"):
        packet_path.parse_mark(text)
