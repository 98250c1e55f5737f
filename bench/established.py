# SPDX-License-Identifier: Apache-2.0
"""What a packet of an established flow costs at a device, by either engine, and one of no flow, by
test runs.

    sudo .venv/bin/python -m bench.established [--rounds N] [--folder FOLDER]

With FOLDER, a working tree of another commit, the two are measured in turn, so that both meet the
same state of the machine. Each figure is the smallest mean of all rounds.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from bench import flow_program, targets
from bench.report import Lines, row_of
from bench.result import run_bench

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    run_bench(__doc__, _measured, rounds=5, folder="")


def _measured(wanted: argparse.Namespace) -> Lines:
    folders = [*filter(None, (wanted.folder,)), str(ROOT)]
    took: dict[tuple[str, str], list[int]] = defaultdict(list)
    for _ in range(wanted.rounds):
        for folder in folders:
            for name, nanoseconds in _one_round(Path(folder)).items():
                took[folder, name].append(nanoseconds)
    for folder in folders:
        yield "programs at a device, a packet, by test runs" + f": {folder}" * bool(wanted.folder)
        for (where, name), each in took.items():
            if where == folder:
                yield row_of(name, each, "ns", _target(name), value=min(each))


def _target(name: str) -> float | None:
    """Return the target of the engine netfilter; the flow tables have none."""
    protocol, state, hook = name.split(", ")
    if state == "for no service":
        is_udp_ingress = (protocol, hook) == ("UDP", "ingress")
        return targets.NO_SERVICE_UDP_INGRESS if is_udp_ingress else targets.NO_SERVICE
    return targets.CHOSEN[protocol] if state == "by netfilter" else None


def _one_round(folder: Path) -> dict[str, int]:
    """Measure the code of this folder, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", Path(flow_program.__file__).read_text()],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
