# SPDX-License-Identifier: Apache-2.0
"""Arbitrary steps of a node's services, for property tests."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from hypothesis import strategies as some
from msgspec import structs

from ebpflb.entries.services import Flags
from ebpflb.model.services import PortName
from ebpflb.plan import tables
from ebpflb.plan.desired import DesiredBackend, DesiredService
from tests.plan import builders
from tests.plan.node import PlannedNode


def small_tables() -> AbstractContextManager[object]:
    """Make the tables of lists small, so that each place is looked up after each write."""
    return patch.multiple(tables, PRIMES=(5, 11), PLACES=2)


class Edit(NamedTuple):
    """A new value for one field of one service port; ``gone`` removes the port."""

    service: str
    field: str
    value: Any


class Step(NamedTuple):
    """A number of seconds, then edits for one plan. ``crash``: stop after this number of writes."""

    seconds: float
    edits: list[Edit]
    crash: int | None


HERE = frozenset({"here"})


SCHEDULERS = ("random", "round-robin", "least-connections", "maglev", "source-hash")


def _block(lists: Mapping[int, Flags]) -> tuple[DesiredBackend, ...]:
    backends = [builders.backend(number, flags) for number, flags in sorted(lists.items())]
    return tuple(sorted(backends, key=lambda b: builders.BLOCK_ORDER.index(b.flags - HERE)))


_flags = some.sampled_from(
    [frozenset[str](), frozenset({"endpoints"}), builders.EXTERNAL, builders.RESTRICTED]
)
_networks = (builders.FIRST, builders.SECOND, builders.BOTH_HALVES, builders.THIRD)
_ports = (
    *map(builders.frontend, (1, 2, 3)),
    *(builders.frontend(n)._replace(port=81) for n in (1, 4)),
)
_frontends = some.dictionaries(some.sampled_from(_ports), _flags, min_size=1, max_size=4)
_lists = builders.BLOCK_ORDER
_backends = some.dictionaries(
    some.integers(1, 5),
    some.sampled_from([*_lists, *(flags | HERE for flags in _lists)]),
    max_size=5,
).map(_block)
_VALUES: dict[str, some.SearchStrategy[Any]] = {
    "backends": _backends,
    "frontends": _frontends,
    "source_ranges": some.lists(some.sampled_from(_networks), unique=True, max_size=3).map(tuple),
    "affinity_seconds": some.sampled_from([0, 60]),
    "scheduler": some.sampled_from(SCHEDULERS),
    "weights": some.lists(some.sampled_from([1, 50, 100]), min_size=5, max_size=5),
    "created": some.sampled_from(["2024", "2025"]),
    "gone": some.none(),
}
_edits = some.sampled_from(list(_VALUES)).flatmap(
    lambda field: some.builds(Edit, some.sampled_from("abcd"), some.just(field), _VALUES[field])
)
_seconds = some.sampled_from([0.0, 0.5, 1.0, 3.0])
_edit_lists = some.lists(_edits, min_size=1, max_size=4)

steps = some.lists(some.builds(Step, _seconds, _edit_lists, some.none()), min_size=1, max_size=8)
steps_with_crashes = some.lists(
    some.builds(Step, _seconds, _edit_lists, some.none() | some.integers(0, 25)),
    min_size=1,
    max_size=6,
)


def changes(node: PlannedNode, edits: list[Edit]) -> dict[PortName, DesiredService | None]:
    """Return the node's desired state after the edits."""
    found: dict[PortName, DesiredService | None] = {}
    for service, field, value in edits:
        name = builders.name(service)
        former = found[name] if name in found else node.desired.get(name)
        former = former or builders.desired(service, [ord(service) - 96], [1, 2])
        found[name] = None if field == "gone" else _edited(former, field, value)
    return found


def _edited(former: DesiredService, field: str, value: Any) -> DesiredService:
    """Return the edited port; all its frontends keep the same scheduler."""
    scheduler = tables.scheduler_of(next(iter(former.frontends.values())))
    if field == "weights":
        weighted = zip(former.backends, value, strict=False)
        return replace(
            former, backends=tuple(structs.replace(b, weight=weight) for b, weight in weighted)
        )
    if field == "scheduler":
        scheduler = value
    else:
        former = replace(former, **{field: value})
    flags = tables.scheduler_flags(scheduler)
    frontends = {f: tables.at_random(its) | flags for f, its in former.frontends.items()}
    return replace(former, frontends=frontends)


def run(node: PlannedNode, steps: list[Step]) -> None:
    """Run the steps; a crash is followed by a restart, which the next crash may cut short."""
    crashed = False
    for step in steps:
        node.wait(step.seconds)
        if crashed:
            node.restart(step.crash)
        if not crashed or step.crash is None:
            node.change(changes(node, step.edits), step.crash)
        crashed = step.crash is not None
    if crashed:
        node.restart()
