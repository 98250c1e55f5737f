# SPDX-License-Identifier: Apache-2.0
"""Go's durations, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.model.addresses import Duration, parse_duration


@pytest.mark.parametrize(
    ("text", "written", "seconds"),
    [
        ("30s", "30s", 30),
        ("1h0m0s", "1h0m0s", 3600),
        ("24h", "24h0m0s", 86400),
        ("0", "0s", 0),
        ("0s", "0s", 0),
        ("1.5h", "1h30m0s", 5400),
        ("90s", "1m30s", 90),
        ("1m2.5s", "1m2.5s", 62.5),
        ("250ms", "250ms", 0.25),
        ("1.5ms", "1.5ms", 1.5e-3),
        ("1.5us", "1.5µs", 1.5e-6),
        ("7ns", "7ns", 7e-9),
        (".5s", "500ms", 0.5),
        ("-1m", "-1m0s", -60),
        ("+2s", "2s", 2),
    ],
)
def test_as_go_writes_it(text: str, written: str, seconds: float) -> None:
    """A duration that Go accepts is read, and written like Go writes it."""
    found = parse_duration(text)
    assert str(found) == written
    assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30", "s", ".s", "1d", "-", " 1s", "1s ", "1 s", "9999999h"])
def test_refused(text: str) -> None:
    """A duration that Go does not accept is rejected, with an example in the message."""
    with pytest.raises(ValueError, match="is not a duration such as 30s or 1h30m"):
        parse_duration(text)


def test_a_number_alone_lacks_its_unit() -> None:
    """The most frequent mistake is named."""
    with pytest.raises(ValueError, match="the unit is missing"):
        parse_duration("30")


@given(some.integers(-(2**62), 2**62))
def test_round_trip(nanoseconds: int) -> None:
    """A written duration reads back the same."""
    assert parse_duration(str(Duration(nanoseconds))) == nanoseconds


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("1ms", 1), ("1.9s", 1), ("2m", 120)])
def test_whole_seconds(text: str, seconds: int) -> None:
    """The kernel gets whole seconds, and 0 only for 0."""
    assert parse_duration(text).whole_seconds == seconds
