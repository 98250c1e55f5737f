# SPDX-License-Identifier: Apache-2.0
"""What a packet costs in the two programs at a device, in nanoseconds.

By the kernel's statistics on live traffic: with the programs at the ebpflb node's uplink alone, so
that no other device's share is mixed in, for packets of established flows, packets that open one,
and packets that are for no service; and at all devices for a whole connection. Once more for those
that are for no service by BPF_PROG_TEST_RUN: the same frame over and over, all in the caches.

Both clocks cost time themselves; what they show for an empty program is taken off.
"""

import struct
from collections import defaultdict
from collections.abc import Callable
from ipaddress import ip_address
from statistics import median

from bench import hooks, services, targets
from bench.hooks import Counted, Packets, Runs
from bench.nodeport_lab import EBPFLB, PLACES, Client, NodePortLab, Where
from bench.report import Lines, Row, row_of
from ebpflb.kernel import bpf
from ebpflb.kernel.programs import loader
from ebpflb.kernel.programs.loader import SCHED_CLS, Program

UPLINK = "eth0"
ROUNDS = 11
TURNS = 100  # of each kind, a round
REPEAT = 20_000  # test runs
_EMPTY = bytes.fromhex("b7000000ffffffff9500000000000000")  # return TC_ACT_UNSPEC

Kind = tuple[str, str]  # what, and which program


def costs(lab: NodePortLab) -> Lines:
    with hooks.statistics():
        clock = clock_cost()
        with Packets(lab.state(EBPFLB)) as everywhere:
            connections = [*_connections(lab, everywhere, clock)]
        lab.restart(EBPFLB, "--devices", UPLINK)
        with Packets(lab.state(EBPFLB)) as uplink:
            live = [*_at_uplink(lab, uplink, clock)]
    yield f"programs at the uplink, a packet; less the {clock:.0f} ns that an empty program shows"
    yield from live
    with Packets(lab.state(EBPFLB)) as uplink:
        yield from _test_runs(uplink)
    yield "programs at all devices of the node, a connection: a byte each way and a reset"
    yield from connections


def clock_cost() -> float:
    """Return the nanoseconds that the kernel counts for an empty program."""
    with Counted([empty_program()]) as empty:
        (program,) = empty.programs
        ran = empty.per_call(lambda: loader.run_program(program.fd, _frame(6), repeat=REPEAT))
    return ran[program.name]


def _at_uplink(lab: NodePortLab, programs: Packets, clock: float) -> Lines:
    """Measure all kinds in turns, round by round."""
    took: dict[Kind, list[float]] = defaultdict(list)
    works = _works(lab)
    for _ in range(ROUNDS):
        for what, work in works.items():
            for name, cost in programs.per_call(work).items():
                took[what, name].append(cost - clock)
    for (what, name), each in took.items():
        yield row_of(f"{what}, {name}", each, "ns")


def _works(lab: NodePortLab) -> dict[str, Callable[[], object]]:
    """Return the work for each figure; other traffic has another client, the same node and pod."""
    theirs = (lab.sites[EBPFLB].pod.v4, services.TARGET)
    works = {}
    for place in PLACES:
        where = lab.target(EBPFLB, place)
        works[f"UDP, established, {place}"] = _work(lab.client, "volley", where)
        works[f"TCP, established, {place}"] = _work(lab.client, "converse", where)
    for place in PLACES:
        works[f"UDP, first of a flow, {place}"] = _work(
            lab.client, "open", lab.target(EBPFLB, place)
        )
    works["UDP, for no service"] = _work(lab.other_client, "volley", theirs)
    works["TCP, for no service"] = _work(lab.other_client, "converse", theirs)
    return works


def _work(client: Client, command: str, where: Where) -> Callable[[], object]:
    return lambda: client.do(command, where, TURNS)


def _connections(lab: NodePortLab, programs: Packets, clock: float) -> Lines:
    for place in PLACES:
        work = _work(lab.client, "connect", lab.target(EBPFLB, place))
        ran = [programs.during(work) for _ in range(ROUNDS)]
        sums = [sum(_net(runs, clock) for runs in each.values()) / TURNS for each in ran]
        times = ", ".join(
            f"{name} runs {runs.times / TURNS:.0f} times" for name, runs in ran[0].items()
        )
        yield row_of(f"both, {place}", sums, "ns", note=times)


def _net(runs: Runs, clock: float) -> float:
    return runs.nanoseconds - clock * runs.times


def _test_runs(programs: Packets) -> Lines:
    """Return the times of test runs without statistics; an empty program's is subtracted."""
    with Counted([empty_program()]) as empty:
        nothing = test_run(empty.programs[0], _frame(6))
    for name, protocol in (("UDP", 17), ("TCP", 6)):
        for each in programs.programs:
            took = test_run(each, _frame(protocol)) - nothing
            yield Row(
                f"{name}, for no service, {each.name}, test run", took, "ns", targets.NO_SERVICE
            )


def test_run(program: Program, frame: bytes, rounds: int = ROUNDS) -> float:
    runs = [
        loader.run_program(program.fd, frame, repeat=REPEAT, ingress_ifindex=1).nanoseconds
        for _ in range(rounds)
    ]
    return median(runs)


def empty_program() -> Program:
    fd = bpf.prog_load(name="empty", program_type=SCHED_CLS, attach_type=0, code=_EMPTY, log=None)
    return Program("empty", fd, 0)


def _frame(protocol: int) -> bytes:
    """Return Ethernet, IPv4, and ports, without the opening of a TCP connection."""
    source, destination = (ip_address(it).packed for it in ("198.51.100.9", "203.0.113.9"))
    ports = struct.pack("!HH", 40000, 443)
    tcp = ports + struct.pack("!IIBBHHH", 1, 1, 5 << 4, 0x10, 512, 0, 0)
    body = tcp if protocol == 6 else ports + struct.pack("!HH", 8, 0)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, protocol, 0)
    return bytes(12) + b"\x08\x00" + head + source + destination + body
