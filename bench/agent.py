# SPDX-License-Identifier: Apache-2.0
"""What the agent costs: memory, starts, and the time until a change is in force.

A start is timed from the process to the status file that says all is programmed, so Python's own
start is in it; the bytecode is in the cache already. Memory is read when the agent is idle.
"""

import random
import time
from statistics import median

from bench import services, targets
from bench.connect_lab import ConnectLab, MeasuredAgent, Start
from bench.report import Lines, Row, percentile, row_of

STARTS = 3  # cold, and as many warm
FIRST_STARTS = 10  # with one Service
CHANGES = 200
PAUSE = 0.05  # seconds between two changes, and a random time up to as much again
MS = 1e6


def starts(lab: ConnectLab, many: str) -> Lines:
    """Start both agents; return their memory and the time of their starts."""
    lab.one.start()
    yield "agent"
    yield memory(lab.one, "memory, idle, 1 service", targets.MEMORY_IDLE)
    first = [lab.one.cold_start() for _ in range(FIRST_STARTS)]
    yield start_row("first start, 1 service", first, targets.FIRST_START)
    cold = [lab.many.cold_start() for _ in range(STARTS)]
    yield memory(lab.many, f"memory, {many}, after a cold start", targets.MEMORY_LARGE)
    before = lab.many.writes()
    warm = [lab.many.warm_restart() for _ in range(STARTS)]
    yield memory(lab.many, f"memory, {many}, after a warm restart", targets.MEMORY_LARGE)
    yield start_row(f"cold start, {many}", cold, targets.COLD_START)
    yield start_row(f"warm restart, {many}", warm, targets.WARM_RESTART)
    updates = (lab.many.writes() - before) / STARTS
    yield Row("  map updates by a warm restart", updates, "", targets.WARM_WRITES)


def changes(lab: ConnectLab, many: str) -> Lines:
    """Replace the measured Service's endpoint repeatedly while a client connects."""
    lab.client.move(lab.many.cgroup)
    took = [_change(lab, turn % 2) for turn in range(1, CHANGES + 1)]
    yield f"manifest replaced -> first answer from the new endpoint: {CHANGES} changes, {many}"
    yield row_of("p50", took, "ms", targets.FIRST_ANSWER_P50)
    p99, note = percentile(took, 0.99), f"all: {min(took):.1f} to {max(took):.1f}"
    yield Row("p99", p99, "ms", targets.FIRST_ANSWER_P99, note)


def _change(lab: ConnectLab, backend: int) -> float:
    """Return milliseconds."""
    where = (services.ADDRESS, services.PORT)
    lab.client.begin("wait_for", where, lab.backends[backend].name)
    lab.client.answer()  # the first answer: still of the former endpoint
    time.sleep(PAUSE * (1 + random.random()))
    begun = lab.many.serve_by(backend)
    return float(lab.client.answer() - begun) / MS


def memory(bench: MeasuredAgent, what: str, target: float) -> Row:
    size = bench.memory()
    note = f"RSS; PSS {size['Pss']:.0f}, anonymous {size['Anonymous']:.0f}"
    return Row(what, size["Rss"], "MB", target, note)


def start_row(what: str, starts: list[Start], target: float) -> Row:
    took = [each.seconds for each in starts]
    note = f"CPU {median(each.cpu for each in starts):.2f} s"
    return row_of(what, took, "s", target, note)
