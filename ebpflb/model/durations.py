# SPDX-License-Identifier: Apache-2.0
"""Go's durations as text: "300ms", "1h0m0s", "-1.5h" (time.ParseDuration, Duration.String)."""

import re

from ebpflb.errors import quoted

_NANOSECONDS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_LONGEST = 2**63 - 1  # nanoseconds: Go's int64
_LONGEST_TEXT = 64  # characters: all that mean something are shorter
NOT_A_DURATION = "is not a duration such as 30s or 1h30m"


class Duration(int):
    """A number of nanoseconds; str() gives what Go writes."""

    @property
    def seconds(self) -> float:
        return self / 10**9

    @property
    def whole_seconds(self) -> int:
        """Whole seconds for the kernel's timeouts: rounded down, but at least 1 unless it is 0."""
        return max(1, self // 10**9) if self else 0

    def __str__(self) -> str:
        sign, rest = ("-" if self < 0 else ""), abs(int(self))
        if rest < 10**9:
            return sign + _short(rest)
        minutes, rest = divmod(rest, 60 * 10**9)
        hours, minutes = divmod(minutes, 60)
        seconds = f"{_decimal(rest, 9)}s"
        if hours:
            return f"{sign}{hours}h{minutes}m{seconds}"
        return f"{sign}{minutes}m{seconds}" if minutes else sign + seconds

    __repr__ = __str__


def parse(text: str) -> Duration:
    """Parse a duration.

    Raises ValueError, with a message for the operator, if Go does not accept it.
    """
    number = text[1:] if text[:1] in ("-", "+") else text
    nanoseconds = None if len(text) > _LONGEST_TEXT else 0 if number == "0" else _sum(number)
    if nanoseconds is None or nanoseconds > _LONGEST:
        unit = ": the unit is missing" if number.isdecimal() else ""
        raise ValueError(f"{quoted(text)} {NOT_A_DURATION}{unit}")
    return Duration(-nanoseconds if text.startswith("-") else nanoseconds)


def _sum(number: str) -> int | None:
    total = at = 0
    while at < len(number):
        part = _PART.match(number, at)
        if part is None or not (part[1] or part[2]):
            return None
        unit, fraction = _NANOSECONDS[part[3]], part[2] or ""
        total += int(part[1] or 0) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
        at = part.end()
    return total if number else None


def _short(nanoseconds: int) -> str:
    """Format a duration of less than a second."""
    if not nanoseconds:
        return "0s"
    for digits, unit in ((6, "ms"), (3, "µs")):
        if nanoseconds >= 10**digits:
            return _decimal(nanoseconds, digits) + unit
    return f"{nanoseconds}ns"


def _decimal(number: int, digits: int) -> str:
    """Return ``number`` divided by 10**``digits``, without trailing zeros."""
    whole, fraction = divmod(number, 10**digits)
    return f"{whole}.{fraction:0{digits}}".rstrip("0") if fraction else str(whole)
