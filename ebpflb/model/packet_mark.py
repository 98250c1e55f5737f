# SPDX-License-Identifier: Apache-2.0
"""The mark of packets that the flow tables have translated at ingress.

netfilter cannot tell them from packets that were sent to the endpoint; by the mark a rule in
FORWARD or INPUT can, as by kube-proxy's 0x4000 or by ``ct status dnat`` beside kube-proxy.
"""

from typing import NamedTuple

_BITS = 32


class PacketMark(NamedTuple):
    """The bits in ``mask`` become those of ``mark``; no mask: packets are not marked."""

    mark: int = 0
    mask: int = 0

    def __str__(self) -> str:
        """As ``parse`` takes it."""
        return f"{self.mark:#x}/{self.mask:#x}" if self.mask else ""


OFF = PacketMark()


def parse(text: str) -> PacketMark:
    """MARK/MASK, decimal or with 0x; MARK alone sets all bits; "" is OFF. Raises ValueError."""
    if not text:
        return OFF
    mark, slash, mask = text.partition("/")
    try:
        found = PacketMark(int(mark, 0), int(mask, 0) if slash else (1 << _BITS) - 1)
    except ValueError as error:
        raise ValueError(f'"{text}" is not MARK/MASK such as 0x4000/0x4000') from error
    if not 0 < found.mask < 1 << _BITS or found.mark & ~found.mask or found.mark <= 0:
        raise ValueError(f'"{text}": MARK must be bits of MASK, and neither may be zero')
    return found
