# SPDX-License-Identifier: Apache-2.0
"""Run the schedules of seeds; for a failing schedule find the shortest one that fails in the same
way.
"""

import gc
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ebpflb.serve.metrics import Metrics
from tests.simulation.api_happenings import ApiHappenings
from tests.simulation.build import Library
from tests.simulation.expected import Wrong
from tests.simulation.happenings import Happenings
from tests.simulation.node import SimNode
from tests.simulation.steps import Step, draw, draw_api

ATTEMPTS = 400  # at a shorter schedule


class Failure(NamedTuple):
    """The failed check, and the shortest schedule found for it."""

    seed: int
    steps: tuple[Step, ...]
    text: str

    def __str__(self) -> str:
        steps = "\n".join(f"    {step}" for step in self.steps)
        return f"{self.text}\n  EBPFLB_SEED={self.seed}, and the shortest of its steps:\n{steps}"


class Result(NamedTuple):
    """A schedule's number of kernel changes, its number of agents' lives, and its failure."""

    changes: int
    lives: int
    error: str | None


class Runner:
    """Runs schedules one after the other, with one library and one folder."""

    def __init__(self, library: Library, folder: Path, *, api: bool = False) -> None:
        """``api``: put an API server between cluster and agent."""
        self.library, self.folder, self.metrics = library, folder, Metrics()
        self.happenings = ApiHappenings if api else Happenings
        self.draw = draw_api if api else draw

    def close(self) -> None:
        self.metrics.close()

    def run(self, steps: Sequence[Step]) -> Result:
        """Run a schedule; any exception is a failure."""
        parts = self.library, self.folder, self.metrics
        node = SimNode(*parts, list(steps), self.happenings)
        try:
            with _quiet(), _collected_once():
                node.run()
        except (Exception, Wrong) as error:
            return Result(node.changes, node.lives, f"{type(error).__name__}: {error}")
        return Result(node.changes, node.lives, None)

    def failure(self, seed: int) -> Failure | None:
        """Return the failure in the schedule of a seed, if any."""
        steps = self.draw(seed)
        error = self.run(steps).error
        return self._shortest(seed, steps, error) if error else None

    def _shortest(self, seed: int, steps: list[Step], text: str) -> Failure:
        """Return only the steps that matter for the failure."""
        left, size = ATTEMPTS, len(steps) // 2
        while size and left:
            for shorter in _without(steps, size):
                left -= 1
                if (error := self.run(shorter).error) and _alike(error, text):
                    steps, text = shorter, error
                    break
                if not left:
                    break
            else:
                size //= 2
        return Failure(seed, tuple(steps), text)


def _without(steps: list[Step], size: int) -> Iterator[list[Step]]:
    for start in range(0, len(steps), size):
        yield steps[:start] + steps[start + size :]


def _alike(one: str, other: str) -> bool:
    """Whether two errors are equal except for frontends and backends."""
    words = (re.sub(r"\(.*?\)|[0-9.:]+", "", text)[:40] for text in (one, other))
    return len(set(words)) == 1


@contextmanager
def _collected_once() -> Iterator[None]:
    """Disable garbage collection: one collection at the end takes a tenth of the time of all."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable the agent's log, which would have thousands of deliberate failures."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
