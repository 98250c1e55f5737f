# SPDX-License-Identifier: Apache-2.0
"""What a benchmark has measured, as a JSON file; and how every benchmark begins and ends."""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from bench import report
from bench.report import Line, Row


class Result(msgspec.Struct, frozen=True):
    """One run of one benchmark. A line that is no row is a heading of the rows after it."""

    command: str  # the module and its options
    machine: str  # as it was at the end of the run
    seconds: int
    lines: list[Line]

    def headed(self) -> Iterator[tuple[str, Row]]:
        """Yield all rows, each with its heading."""
        heading = ""
        for line in self.lines:
            if isinstance(line, Row):
                yield heading, line
            else:
                heading = line

    def rows(self, heading: str = "") -> list[Row]:
        """Return the rows below headings that begin so."""
        return [row for above, row in self.headed() if above.startswith(heading)]

    def text(self) -> str:
        """Return the printed form."""
        return f"# {self.command}\n{self.machine}\n{report.table(self.lines)}"


def write(result: Result, path: Path) -> None:
    """Write in one step, so that an interrupted run leaves the former file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_bytes(msgspec.json.format(msgspec.json.encode(_rounded(result)), indent=1) + b"\n")
    half.replace(path)


def _rounded(result: Result) -> Result:
    """Round to six digits: others are noise, and make the files long."""
    lines = [line if isinstance(line, str) else _short(line) for line in result.lines]
    return msgspec.structs.replace(result, lines=lines)


def _short(row: Row) -> Row:
    values = {name: float(f"{getattr(row, name):.6g}") for name in ("value", "low", "high")}
    return msgspec.structs.replace(row, **values)


def read(path: Path) -> Result:
    """Read a file. Raises msgspec.ValidationError if it is another version's."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


def run_bench(
    description: str | None,
    measure: Callable[[argparse.Namespace], Iterable[Line]],
    **options: int | float | str,
) -> None:
    """Measures, with these options and their usual values; prints the figures, and writes them
    with ``--json FILE``. What ends the process by a signal lets it clean up.
    """
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(
        description=(description or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, usual in options.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(usual), default=usual, help="usually")
    parser.add_argument("--json", type=Path, help="file that the figures go to as well")
    wanted = parser.parse_args()
    begun = time.monotonic()
    lines = list(measure(wanted))
    result = Result(_command(), report.machine(), round(time.monotonic() - begun), lines)
    print(result.text())
    if wanted.json:
        write(result, wanted.json)


def _command() -> str:
    """Return the command as typed, without the output file."""
    module = f"bench.{Path(sys.argv[0]).stem}"
    words = iter(sys.argv[1:])
    kept = [word for word in words if word != "--json" or not next(words)]
    return shlex.join(["python", "-m", module, *kept])
