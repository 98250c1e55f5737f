# SPDX-License-Identifier: Apache-2.0
"""What a connection through a ClusterIP costs, and what the agent costs.

    sudo .venv/bin/python -m bench.connect [--services N] [--endpoints M] [--rounds K]

One run, five questions, two files:

latency.py  1  connect and request over TCP, direct and through the ClusterIP, with one Service
               programmed, with many, and with no hooks at all: in turns, connection by connection
               and round by round, so that drift of the machine hits all alike
            2  the hooks' run time a call, by the kernel's statistics
agent.py    3  the agent's memory
            4  a changed manifest -> the first answer from the new endpoint
            5  cold start and warm restart

Medians throughout; each figure stands beside its target. Everything that it makes is removed at the
end, also if it is interrupted.
"""

import argparse
from contextlib import ExitStack

from bench import agent, latency, services
from bench.connect_lab import ConnectLab
from bench.hooks import Hooks
from bench.report import Line, Lines
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab

PREFIX = "ebpflb-connect"


def main() -> None:
    run_bench(__doc__, _measured, services=10_000, endpoints=100_000, rounds=100)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab(PREFIX) as (lab, folder, stack):
        return _measure(ConnectLab(lab, folder, stack), stack, wanted)


def _measure(lab: ConnectLab, stack: ExitStack, wanted: argparse.Namespace) -> list[Line]:
    """The measured Service is one of the many; it has one endpoint and two ports."""
    services.write_many(lab.many.agent.manifests, wanted.services - 1, wanted.endpoints - 1)
    many = f"{wanted.services:,} services / {wanted.endpoints:,} endpoints"
    rows = [*_told("starts", agent.starts(lab, many))]
    hooks = {
        "1 service": stack.enter_context(Hooks(lab.one.state, lab.one.cgroup)),
        f"{wanted.services:,} services": stack.enter_context(
            Hooks(lab.many.state, lab.many.cgroup, many=True)
        ),
    }
    rows += _told("changes", agent.changes(lab, many))
    first = _told("latency", latency.requests(lab, hooks, wanted.rounds))
    first += _told("hooks", latency.run_times(lab, hooks, wanted))
    return first + rows


def _told(what: str, rows: Lines) -> list[Line]:
    print_step(f"measuring {what}")
    return list(rows)


if __name__ == "__main__":
    main()
