# SPDX-License-Identifier: Apache-2.0
"""What the agent costs: memory, starts, and the time until a change is in force.

A start is timed from the process to the status file that says all is programmed, so Python's own
start is in it; the bytecode is in the cache already. Memory is read when the agent is idle.
"""

import random
import re
import time
from statistics import median

from bench import services
from bench.connect_lab import ConnectLab, MeasuredAgent, Start
from bench.report import Lines, Row, percentile, spread

STARTS = 3  # cold, and as many warm
CHANGES = 200
PAUSE = 0.05  # seconds between two changes, and a random time up to as much again
MS = 1e6


def starts(lab: ConnectLab, many: str) -> Lines:
    """Starts both agents; their memory and the time of their starts."""
    lab.one.start()
    yield "agent"
    yield memory(lab.one, "memory, idle, 1 service", 80)
    cold = [lab.many.cold_start() for _ in range(STARTS)]
    yield memory(lab.many, f"memory, {many}, after a cold start", 200)
    before = lab.many.writes()
    warm = [lab.many.warm_restart() for _ in range(STARTS)]
    yield memory(lab.many, f"memory, {many}, after a warm restart", 200)
    yield start_row(f"cold start, {many}", cold, 10)
    written = [_written(each.log) for each in cold]
    yield Row("  of which map writes", median(written), "s", 1, spread(written, 2))
    yield start_row(f"warm restart, {many}", warm, 2)
    yield Row("  map updates by all warm restarts", lab.many.writes() - before, "", 0)


def changes(lab: ConnectLab, many: str) -> Lines:
    """The measured Service's endpoint is replaced, again and again, while a client connects."""
    lab.client.move(lab.many.cgroup)
    took = [_change(lab, turn % 2) for turn in range(1, CHANGES + 1)]
    yield f"manifest replaced -> first answer from the new endpoint: {CHANGES} changes, {many}"
    yield Row("p50", percentile(took, 0.5), "ms", 20, spread(took, 1))
    yield Row("p99", percentile(took, 0.99), "ms", 100, f"all: {min(took):.1f} to {max(took):.1f}")


def _change(lab: ConnectLab, backend: int) -> float:
    """Milliseconds."""
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
    note = f"{spread(took, 2)}; CPU {median(each.cpu for each in starts):.2f} s"
    return Row(what, median(took), "s", target, note)


def _written(log: str) -> float:
    """Seconds, from the agent's lines about its first plans."""
    return sum(map(float, re.findall(r"written in ([\d.]+) ms", log))) / 1e3
