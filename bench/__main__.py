# SPDX-License-Identifier: Apache-2.0
"""Runs all benchmarks, draws their results, and renews the pages that show them.

    sudo .venv/bin/python -m bench [--only PART,...] [--quick] [--pages-only] [--results FOLDER]

Each part is a process of its own, which removes what it has made also when it is interrupted. One
that fails is named at the end, its former result stays, and the others go on.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench import page
from bench.parts import PARTS, Part
from bench.temporary_lab import print_step

TIMEOUT = 1800.0  # seconds, of one part
END_TIMEOUT = 60.0  # for its cleaning up


def main() -> None:
    """Run the parts; return 1 if a part failed, 130 after an interruption."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    wanted = _arguments()
    failed = []
    try:
        for part in () if wanted.pages_only else wanted.only:
            if not run(part, wanted.quick, wanted.results):
                failed.append(part.name)
    except KeyboardInterrupt:
        sys.exit(130)
    page.renew(wanted.results, page.PAGES if wanted.results == page.RESULTS else ())
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(part: Part, quick: bool, results: Path) -> bool:
    """Run a part; return whether it succeeded. Raises KeyboardInterrupt after cleaning up."""
    options = (part.quick if quick else part.whole).split()
    file = str(results / f"{part.name}.json")
    command = [sys.executable, "-m", part.module, *options, "--json", file]
    begun = time.monotonic()
    process = subprocess.Popen(command, cwd=page.ROOT, start_new_session=True)
    try:
        status = process.wait(TIMEOUT)
    except (KeyboardInterrupt, subprocess.TimeoutExpired) as ending:
        _end(process)
        if isinstance(ending, KeyboardInterrupt):
            raise
        status = None
    how = "ended" if status == 0 else "FAILED"
    print_step(f"{part.name} {how} after {time.monotonic() - begun:.0f} s")
    return status == 0


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", type=_parts, default=[part for part in PARTS.values() if part.usual],
        help=f"some of {', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--pages-only", action="store_true", help="measure nothing")
    parser.add_argument(
        "--results", type=Path, default=page.RESULTS,
        help="folder; with another one than usual no page is written",
    )  # fmt: skip
    return parser.parse_args()


def _parts(names: str) -> list[Part]:
    unknown = set(names.split(",")) - set(PARTS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}")
    return [PARTS[name] for name in names.split(",")]


if __name__ == "__main__":
    main()
