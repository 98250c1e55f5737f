# SPDX-License-Identifier: Apache-2.0
"""The audit of the nft table that keeps conntrack and NAT at work (nat_watch.py)."""

from collections.abc import Iterator

from ebpflb.model.drift import Drift, Part
from ebpflb.node import nat
from ebpflb.node.nat_watch import NatWatch

TABLE = "conntrack table"
_REMOVED = "had been removed or changed by another program"


class NatCheck:
    """The watch looks at once after a removal, and puts back itself; here that is reported."""

    name = TABLE

    def __init__(self, watch: NatWatch, period: float) -> None:
        self._watch, self.period = watch, period
        self._reported = 0

    possible = True

    def steps(self) -> Iterator[list[Drift]]:
        restored = self._watch.restored
        if self._watch.lacking or restored > self._reported:
            yield [Drift(Part.TABLE, str(nat.ENGINE), _REMOVED)]
        self._reported = restored
        yield [Drift(Part.FLOWTABLE, str(nat.ENGINE), said) for said in self._watch.take_differs()]

    def repair(self) -> None:
        """The watch has done it already."""
