# SPDX-License-Identifier: Apache-2.0
"""Trigger times of slices: which are kept, and how long (kube-proxy.md 16.4)."""

from datetime import UTC, datetime

import pytest

from ebpflb.model.addresses import Family
from ebpflb.model.cluster_state import MOST_TIMES, TriggerTimes, trigger_time
from ebpflb.model.events import Key

SINCE = datetime(2026, 11, 21, 10, tzinfo=UTC).timestamp()
EARLIER, FIRST, SECOND = (
    f"2026-11-21T{text}" for text in ("09:59:59Z", "10:00:01.123456789Z", "12:00:02+02:00")
)
WEB, SHOP = Key("default", "web"), Key("default", "shop")
V4, V6 = Family.IPV4, Family.IPV6


@pytest.fixture
def triggers() -> TriggerTimes:
    return TriggerTimes(SINCE)


def seconds(times: dict[Family, list[float]]) -> dict[Family, list[int]]:
    """Return the seconds after the start."""
    return {family: sorted(int(each - SINCE) for each in found) for family, found in times.items()}


def test_each_change_is_remembered_until_a_sync_takes_it(triggers: TriggerTimes) -> None:
    """Every change counts once, in its family, and after a sync none is left."""
    triggers.changed(WEB, V4, FIRST)
    triggers.changed(WEB, V4, SECOND)
    triggers.changed(SHOP, V4, SECOND)
    triggers.changed(WEB, V6, FIRST)
    assert seconds(triggers.take()) == {V4: [1, 2, 2], V6: [1]}
    assert triggers.take() == {}


@pytest.mark.parametrize("text", [EARLIER, "2026-11-21T10:00:00Z"])
def test_changes_before_the_start_are_not_measured(triggers: TriggerTimes, text: str) -> None:
    """Only changes after this process's start are measured as its delay."""
    triggers.changed(WEB, V4, text)
    assert triggers.take() == {}


def test_slice_deletion_clears_the_service(triggers: TriggerTimes) -> None:
    """All times of the slice's service and family are forgotten, and no others."""
    triggers.changed(WEB, V4, FIRST)
    triggers.changed(WEB, V4, SECOND)
    triggers.changed(WEB, V6, FIRST)
    triggers.changed(SHOP, V4, SECOND)
    triggers.removed(WEB, V4)
    triggers.removed(WEB, V4)
    assert seconds(triggers.take()) == {V4: [2], V6: [1]}


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "yesterday",
        "2026-11-21",
        "2026-11-21 10:00:01Z",
        "2026-11-21T10:00:01",
        "2026-13-21T10:00:01Z",
        "2026-11-21T10:00:01.Z",
        "20261121T100001Z",
        "２026-11-21T10:00:01Z",
        "2026-11-21T10:00:01Z\n",
    ],
)
def test_annotations_that_are_no_time_are_ignored(triggers: TriggerTimes, text: str | None) -> None:
    """A missing or invalid time is not measured, and breaks nothing."""
    assert trigger_time(text) is None
    triggers.changed(WEB, V4, text)
    assert triggers.take() == {}


def test_rfc3339_nano_is_read() -> None:
    """Fractions of any length, and offsets, are read, to the microsecond."""
    assert trigger_time(FIRST) == pytest.approx(SINCE + 1.123456, abs=1e-6)
    assert trigger_time(SECOND) == SINCE + 2
    assert trigger_time("2026-11-21T10:00:01.5Z") == SINCE + 1.5


def test_the_times_of_a_namespace_that_waits_stay(triggers: TriggerTimes) -> None:
    """A limited number of times of a waiting namespace stays; other namespaces are not delayed."""
    waiting = Key("flood", "x")
    for _ in range(2 * MOST_TIMES):
        triggers.changed(waiting, V4, FIRST)
    triggers.changed(WEB, V4, SECOND)
    assert seconds(triggers.take({"flood"})) == {V4: [2]}
    assert seconds(triggers.take()) == {V4: [1] * MOST_TIMES}
