# SPDX-License-Identifier: Apache-2.0
"""When the changes of endpoints happened that wait for a sync (kube-proxy.md 16.4).

The EndpointSlice controller writes into an annotation when the pod or Service changed that made it
write the slice. These times are stored until a sync succeeds; changes from before this process
started are not its delay.
"""

import re
from collections import defaultdict
from datetime import datetime

from ebpflb.model.addresses import Family
from ebpflb.model.events import Key

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)


def trigger_time(text: str | None) -> float | None:
    """Seconds since the epoch; None for a text that is missing, or no time in RFC 3339."""
    if text is None or not _RFC3339.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


class TriggerTimes:
    """The trigger times of the changes that no sync has covered yet.

    ``since`` is when this process started, in seconds since the epoch.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self._times: dict[tuple[Key, Family], list[float]] = {}

    def changed(self, service: Key, family: Family, annotation: str | None) -> None:
        """A slice of the service was added or modified."""
        time = trigger_time(annotation)
        if time is not None and time > self.since:
            self._times.setdefault((service, family), []).append(time)

    def removed(self, service: Key, family: Family) -> None:
        """A slice of the service was deleted: its annotation is of an earlier change."""
        self._times.pop((service, family), None)

    def take(self) -> dict[Family, list[float]]:
        """All stored times, which are deleted by this: call it when a sync has succeeded."""
        found: dict[Family, list[float]] = defaultdict(list)
        for (_, family), times in self._times.items():
            found[family] += times
        self._times = {}
        return dict(found)
