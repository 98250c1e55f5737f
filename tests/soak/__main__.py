# SPDX-License-Identifier: Apache-2.0
"""`make soak`: new schedules of the simulation, and real traffic, for as long as requested.

It ends after ``--for`` (such as 30s, 10m, 8h), or with Ctrl-C, and reports. The exit status is 1 if
a schedule has failed, or a promise to the clients was broken (bench/history.py).
"""

import multiprocessing
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from tests.kit.interrupted import interrupted_alone
from tests.simulation.build import Library
from tests.simulation.schedules import Runner
from tests.soak import connections
from tests.soak.connections import Counts

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SAY_EVERY = 60.0  # seconds


class Simulated:
    """The results of the schedules."""

    def __init__(self) -> None:
        self.schedules = self.steps = self.changes = self.lives = 0
        self.failures: list[str] = []


def simulate(seed: int, ended: Event, results: Connection) -> None:
    """Run the schedules of this seed and the following ones, alternately with and without an API
    server, in a process that Ctrl-C does not end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = Simulated()
    with TemporaryDirectory(prefix="ebpflb-soak-") as folder:
        library = Library()
        runners = [Runner(library, Path(folder), api=api) for api in (False, True)]
        while not ended.is_set():
            runner, steps = runners[seed % 2], runners[seed % 2].draw(seed)
            found = runner.run(steps)
            done.schedules, done.steps = done.schedules + 1, done.steps + len(steps)
            done.changes, done.lives = done.changes + found.changes, done.lives + found.lives
            if found.error:
                kind = "with an API server" if seed % 2 else "without an API server"
                done.failures.append(f"{kind}: {runner.failure(seed) or found.error}")
            seed += 1
    results.send(done)


def seconds(text: str) -> float:
    """Return the number of seconds for "90s", "10m" or "8h". Raises click.BadParameter."""
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if not found:
        raise click.BadParameter(f'"{text}" is no time such as 90s, 10m or 8h')
    return int(found[1]) * float(UNITS[found[2]])


def send_traffic(
    seed: int, is_over: Callable[[], bool], file: Path | None, *, unprotected: bool
) -> Counts:
    """Send traffic until the end or Ctrl-C; the counts until then are kept."""
    counts = Counts()
    running = connections.running(seed, counts, file, unprotected=unprotected)
    with suppress(KeyboardInterrupt), running as traffic:
        said = time.monotonic()
        try:
            while not is_over():
                traffic.round(is_over)
                if time.monotonic() - said > SAY_EVERY:
                    said = time.monotonic()
                    click.echo(f"  {_connections(counts)}")
        except KeyboardInterrupt:
            click.echo("ending")
    return counts


def _connections(counts: Counts) -> str:
    return (
        f"{counts.answers:,} answers, {sum(counts.lost.values())} broken promises; "
        f"{counts.rewrites:,} changes of endpoints; {counts.restarts:,} restarts of the agent, "
        f"{counts.kills:,} by SIGKILL; p50 {counts.percentile(0.5):.2f} ms, "
        f"p99 {counts.percentile(0.99):.2f} ms"
    )


def report(simulated: Simulated, counts: Counts, seed: int, spent: float) -> bool:
    """Print the report; return whether everything went well."""
    click.echo(f"{spent:.0f} s, from seed {seed} on")
    click.echo(
        f"simulation: {simulated.schedules:,} schedules, {simulated.steps:,} steps, "
        f"{simulated.changes:,} changes of the kernel, {simulated.lives:,} agents; "
        f"{len(simulated.failures)} failed"
    )
    click.echo(f"traffic: {_connections(counts)}")
    click.echo(f"open connections were found alive {counts.kept:,} times")
    for text in (*simulated.failures, *(f"{what}: {n} times" for what, n in counts.lost.items())):
        click.echo(text)
    return not simulated.failures and not counts.lost


@click.command()
@click.option("--for", "how_long", default="", help="such as 10m; without it until Ctrl-C")
@click.option("--seed", default="", help="the first one; without it by the clock")
@click.option("--history", type=Path, help="file that every request and fault is added to")
@click.option(
    "--unprotected", is_flag=True, help="nothing that others remove is put back: this must fail"
)
def main(how_long: str, seed: str, history: Path | None, unprotected: bool) -> None:
    begun, first = time.monotonic(), int(seed or time.time())
    interrupted_alone()
    until = begun + seconds(how_long) if how_long else float("inf")
    ended, (results, giving) = multiprocessing.Event(), multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=simulate, args=(first, ended, giving))
    process.start()
    try:
        counts = send_traffic(
            first, lambda: time.monotonic() > until, history, unprotected=unprotected
        )
    finally:
        ended.set()
    simulated = results.recv()
    process.join()
    sys.exit(0 if report(simulated, counts, first, time.monotonic() - begun) else 1)


if __name__ == "__main__":
    main()
