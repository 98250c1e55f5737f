# SPDX-License-Identifier: Apache-2.0
"""What a packet of an established connection costs amid ever more of them in the flow tables.

Once of a single connection, whose flow the caches hold; and once each of another one, drawn at
random: those look for their flows in memory when there are many. By BPF_PROG_TEST_RUN, a run each,
and the kernel's statistics; what these show for an empty program is taken off.
"""

import itertools
import random
import socket
from collections.abc import Sequence

from bench import flow_program, hooks
from bench.hooks import Counted
from bench.packets import clock_cost
from bench.report import Lines, row_of
from ebpflb.kernel.programs import loader
from ebpflb.kernel.programs.loader import Program

PACKETS = 1000  # a round
HALF_OPEN = 65_536  # of the map's entries
WRITE = 10_000  # entries at once
TCP = socket.IPPROTO_TCP


def costs(sizes: Sequence[int], rounds: int) -> Lines:
    """Measure all sizes with one map; a connection has an entry for each direction."""
    maps, programs = flow_program.load(tcp_flows=2 * sizes[-1] + 2 * HALF_OPEN)
    yield "a packet of an established TCP connection, amid others"
    with Counted(programs) as counted, hooks.statistics():
        clock, known = clock_cost(), 0
        for size in sizes:
            for first in range(known, size, WRITE):
                flows = range(first, min(first + WRITE, size))
                for hook in flow_program.KINDS:
                    maps["tcp_flows"].write([flow_program.entry(TCP, hook, it) for it in flows])
            known = size
            for program, most in itertools.product(counted.programs, sorted({1, size})):
                took = [_cost(counted, program, most) - clock for _ in range(rounds)]
                what = f"{program.name}, of {'one connection' if most == 1 else 'any'}"
                yield row_of(what, took, "ns", at=size, axis="connections")
    for each in maps.values():
        each.close()


def _cost(counted: Counted, program: Program, most: int) -> float:
    """Return the nanoseconds per packet of one of this many connections."""
    packets = [flow_program.frame(TCP, random.randrange(most)) for _ in range(PACKETS)]
    ran = counted.per_call(lambda: [loader.run_program(program.fd, packet) for packet in packets])
    return ran[program.name]
