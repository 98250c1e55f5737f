# SPDX-License-Identifier: Apache-2.0
"""What an audit has found to be different from what is planned."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

MAX_NAMED_IN_LINE, MAX_LISTED = 10, 100  # in one line, and in the status


class Part(StrEnum):
    """What it concerns. The values are labels of metrics."""

    HOOK = "hook"  # a program at the cgroup
    DEVICE = "device"  # the programs at a device
    MAP = "map"  # an entry of a map
    PIN = "pin"  # a name in the state directory
    TABLE = "table"  # the nft table of the engine netfilter, and its elements
    FLOWTABLE = "flowtable"  # the kernel's flowtable, of --fast-forward


# While any of these differs, the data plane is not in force. A link or map without its pin serves
# as long as the agent holds it.
IN_FORCE = frozenset({Part.HOOK, Part.DEVICE, Part.MAP, Part.TABLE})


class Drift(NamedTuple):
    """``name``: of what differs, ``found``: in which way; both for the operator."""

    part: Part
    name: str
    found: str

    def __str__(self) -> str:
        return f"{self.name} {self.found}"


def in_force(drifts: Iterable[Drift]) -> bool:
    """Whether the data plane is in force nevertheless."""
    return not any(drift.part in IN_FORCE for drift in drifts)


def named(drifts: Sequence[Drift]) -> dict[str, str]:
    """Name -> what was found; of several with one name the last, and MAX_LISTED at most."""
    listed = {drift.name: drift.found for drift in _every_thing_first(drifts)[:MAX_LISTED]}
    more = len(drifts) - MAX_LISTED
    return listed | ({f"{more} more": "differ"} if more > 0 else {})


def summary(drifts: Sequence[Drift]) -> str:
    """All of it in one line: MAX_NAMED are named, or one of each thing where that is more."""
    things = {_thing(drift) for drift in drifts}
    count = max(MAX_NAMED_IN_LINE, len(things))
    named = "; ".join(map(str, _every_thing_first(drifts)[:count]))
    more = len(drifts) - count
    return f"{named}; and {more} more" if more > 0 else named


def _every_thing_first(drifts: Sequence[Drift]) -> list[Drift]:
    """One of each thing, then the others: a map that lost all its entries hides no other one."""
    firsts: list[Drift] = []
    others: list[Drift] = []
    seen: set[tuple[Part, str]] = set()
    for drift in drifts:
        (others if _thing(drift) in seen else firsts).append(drift)
        seen.add(_thing(drift))
    return firsts + others


def _thing(drift: Drift) -> tuple[Part, str]:
    """The map that an entry is of; all hooks are one thing, and so are all devices."""
    return drift.part, drift.name.partition(":")[0] if drift.part is Part.MAP else ""
