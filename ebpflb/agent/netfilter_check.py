# SPDX-License-Identifier: Apache-2.0
"""The audit of the nft table of the engine netfilter: its rules, and its elements."""

from collections.abc import Iterator

from ebpflb.agent.netfilter_sync import NetfilterSync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.model.drift import Drift, Part
from ebpflb.node import flowtable
from ebpflb.node.nat_watch import NatWatch
from ebpflb.node.netfilter_elements import Change
from ebpflb.node.netfilter_rules import TABLE

TABLE_NAME, ELEMENTS_NAME = "netfilter table", "netfilter elements"
_REMOVED = "had been removed or changed by another program"


class TableCheck:
    """The watch looks at once after a removal, and puts back itself; here that is reported."""

    name = TABLE_NAME

    def __init__(self, watch: NatWatch, period: float) -> None:
        self._watch, self.period = watch, period
        self._reported = 0

    possible = True

    def steps(self) -> Iterator[list[Drift]]:
        put_back = self._watch.put_back
        if put_back > self._reported:
            yield [Drift(Part.TABLE, str(TABLE), _REMOVED)]
        self._reported = put_back
        yield [Drift(Part.TABLE, str(TABLE), said) for said in self._watch.lacking]
        differs = self._watch.take_differs()
        yield [Drift(Part.FLOWTABLE, str(flowtable.TABLE), said) for said in differs]

    def repair(self) -> None:
        """The watch has done it already."""


class ElementsCheck:
    """An element for each backend id; one whose id is in quarantine may still be there."""

    name = ELEMENTS_NAME

    def __init__(self, netfilter: NetfilterSync, service_sync: ServiceSync, period: float) -> None:
        self._netfilter, self._service_sync, self.period = netfilter, service_sync, period
        self._wrong: list[Change] = []

    @property
    def possible(self) -> bool:
        return self._netfilter.active and self._service_sync.complete

    def steps(self) -> Iterator[list[Drift]]:
        self._wrong = []
        for changes in self._netfilter.compare():
            wrong = [each for each in changes if not self._is_quarantined(each)]
            self._wrong += wrong
            yield [Drift(Part.TABLE, f"{TABLE}: {each}", "") for each in wrong]

    def repair(self) -> None:
        wrong, self._wrong = self._wrong, []
        self._netfilter.repair(wrong)

    def _is_quarantined(self, change: Change) -> bool:
        id = change.backend_id
        return change.new is None and id in self._service_sync.planner.backend_ids.used
