# SPDX-License-Identifier: Apache-2.0
"""Where the time of a packet and of a connection through a NodePort goes, by samples.

    sudo .venv/bin/python -m bench.profile [--others N] [--rounds K]

In the lab of ``nodeport``: what a packet of an established flow takes one way (``node_cost``), and
what a connection takes, a byte each way. Each is timed, then done again while perf samples the
processes that do it; the kernel works in their time. All of a round in turns, in a new order each
time. A group's time is its share of the samples of all rounds, of the median time.

It needs Debian's linux-perf.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from bench.flow_frames import KINDS
from bench.node_cost import NodeCost
from bench.nodeport_lab import DIRECT, EBPFLB, LOCAL, NETFILTER, NFTABLES, PLACES, NodePortLab
from bench.report import Line, Lines, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.workers import readable

PREFIX = "ebpflb-profile"
COMPARED = (DIRECT, EBPFLB, NETFILTER, NFTABLES)
CONNECTIONS = 4000  # while perf samples
TIMED = 500
FREQUENCY = 9000  # samples a second
STREAMS = 8  # while perf samples
START_TIMEOUT = 30.0  # seconds, for perf to begin

# By the first pattern that a function's name begins with.
GROUPS = {
    "programs": re.compile(r"bpf_prog_[0-9a-f]+_(in|e)gress|bpf_prog_[0-9a-f]+_\w+[46_]"),
    "helpers and maps": re.compile(
        r"_*(bpf_|htab_|array_map|lru_|lookup_(nulls_)?elem|percpu_array|tcx_|sch_handle|trie_|jhash"
        r"|copy_map_value|pcpu_freelist|xdp_|fib_lookup_skb|check_and_init_map)"
    ),
    "netfilter": re.compile(
        r"_*(nf_|nft_|ipt_|xt_|conntrack|hash_conntrack|hash_by_src|tcp_packet|udp_packet|siphash"
        r"|ipv4_conntrack|get_unique_tuple|early_drop|tcp_in_window|tcp_error|l4proto|find_best)"
    ),
}
OTHER = "all else"  # devices, bridges, routes, sockets

Work = Callable[[], float]  # does it; nanoseconds for one
Works = dict[str, tuple[Work, Work, list[int]]]  # timed, sampled, and the processes that do it


def main() -> None:
    if not shutil.which("perf"):
        raise SystemExit("perf is missing: apt install linux-perf")
    run_bench(__doc__, _measured, others=1000, rounds=7)


def _measured(wanted: argparse.Namespace) -> list[Line]:
    with temporary_lab(PREFIX) as (lab, folder, stack):
        print_step("building the lab")
        built = NodePortLab(lab, folder, stack, wanted.others)
        lines: list[Line] = []
        for what, works in _works(built).items():
            print_step(f"profiling {what}")
            lines += [f"{what}: {wanted.rounds} rounds", *_profiled(works, wanted.rounds, folder)]
        return lines


def _works(lab: NodePortLab) -> dict[str, Works]:
    streams = NodeCost(lab)
    packets: Works = {}
    connections: Works = {}
    for place in PLACES:
        for variant in COMPARED:
            for protocol in KINDS:
                timed, sampled = (
                    _stream(streams, variant, place, protocol, n) for n in (1, STREAMS)
                )
                pids = [streams.senders[variant].process.pid]
                packets[f"{place}, {protocol}, {variant}"] = timed, sampled, pids
            far = lab.sites[variant] if place == LOCAL else lab.far
            pids = [lab.client.process.pid, far.server.pid]
            timed, sampled = (_connect(lab, variant, place, n) for n in (TIMED, CONNECTIONS))
            connections[f"{place}, {variant}"] = timed, sampled, pids
    return {
        "a packet of an established flow, one way": packets,
        "a TCP connection, a byte each way": connections,
    }


def _stream(streams: NodeCost, variant: str, place: str, protocol: str, count: int) -> Work:
    return lambda: median(streams.through(variant, place, protocol) for _ in range(count))


def _connect(lab: NodePortLab, variant: str, place: str, count: int) -> Work:
    return lambda: lab.client.do("connect", lab.target(variant, place), count)[0] / count


def _profiled(works: Works, rounds: int, folder: Path) -> Lines:
    took: dict[str, list[float]] = defaultdict(list)
    samples: dict[str, Counter[str]] = defaultdict(Counter)
    for _ in range(rounds):
        for what, (timed, sampled, pids) in random.sample(list(works.items()), k=len(works)):
            took[what].append(timed())
            samples[what] += _sampled(sampled, pids, folder)
    for what in works:
        whole, shares = median(took[what]), samples[what]
        parts = (f"{group} {whole * shares[group] / shares.total():.0f}" for group in GROUPS)
        yield row_of(what, took[what], "ns", note=", ".join(parts))


def _sampled(work: Work, pids: Sequence[int], folder: Path) -> Counter[str]:
    """Return samples by group, while it is done."""
    file, control, done = folder / "perf.data", folder / "perf.control", folder / "perf.done"
    for fifo in (control, done):
        fifo.unlink(missing_ok=True)
        os.mkfifo(fifo)
    where = ["-p", ",".join(map(str, pids)), "-o", str(file)]
    when = ["-D", "-1", f"--control=fifo:{control},{done}"]
    command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(FREQUENCY), *where, *when]
    orders, answers = (os.open(fifo, os.O_RDWR) for fifo in (control, done))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as perf:
        try:
            os.write(orders, b"enable\n")
            if not readable([answers], START_TIMEOUT):
                raise SystemExit("perf does not sample; what it says is above")
            work()
        finally:
            perf.send_signal(signal.SIGINT)
            os.close(orders)
            os.close(answers)
    shown = subprocess.run(
        ["perf", "script", "-i", str(file), "-F", "ip,sym"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    functions = (line.split(maxsplit=1) for line in shown.stdout.splitlines())
    return Counter(_group(words[1]) for words in functions if len(words) > 1)


def _group(function: str) -> str:
    return next((name for name, known in GROUPS.items() if known.match(function)), OTHER)


if __name__ == "__main__":
    main()
