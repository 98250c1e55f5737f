# SPDX-License-Identifier: Apache-2.0
"""The budget of each program, as each BCC compiles it: its stack, and the verifier's work.

verifier.csv is checked in: for each program and BCC the bytes of its stack, and for each kernel
how many instructions the verifier processes. A program that takes a tenth more than there, or is
not there, fails the lane: growth is meant or it is noticed. No program's stack may exceed
MOST_STACK: the compilers' limit is 512, and another one may use a little more.
`make verifier-table` renews the table.

    python -m vagrant.kernels.verifier      the numbers of this machine's own kernel
"""

import csv
import os
import re
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ebpflb.kernel.maps.bpf_map import Map
    from ebpflb.kernel.programs.compiler import Compiled

TABLE = Path(__file__).with_name("verifier.csv")
GROWTH = 1.10
STACK = "stack"  # the column; the others are named by their kernels
MOST_STACK = 448  # bytes
_STATISTICS = 4  # log_level: only the summary
_LOG_BYTES = 4096
_LDX, _ST, _STX = 1, 2, 3  # classes of instructions
_MOVE, _ADD_NUMBER, _R10 = 0xBF, 0x07, 10


class Row(NamedTuple):
    """One program in one variant, and the version of BCC that compiled it."""

    source: str
    variant: str
    program: str
    bcc: str


Counts = dict[Row, int]
Table = dict[Row, dict[str, str]]


def processed(log: str) -> int:
    """Parse the verifier's summary: processed 1234 insns (limit 1000000) ..."""
    found = re.search(r"processed (\d+) insns", log)
    if found is None:
        raise ValueError(f"the verifier's log has no summary: {log!r}")
    return int(found[1])


def measure() -> Counts:
    """Load every program in every variant that this kernel accepts; return their costs.

    Raises KernelError if one of them is refused.
    """
    from ebpflb.kernel.maps import bpf_map, layout, state_dir
    from ebpflb.kernel.programs import compiler, precompile
    from ebpflb.options import Paths
    from vagrant.kernels import bytecode

    counts: Counts = {}
    bcc = bytecode.bcc_of(compiler.BROUGHT)
    with ExitStack() as opened:
        made: dict[str, Map] = {}
        for name, spec in layout.PROGRAM_MAPS.items():
            made[name] = bpf_map.open_map(spec, state_dir.create_map(spec))
            opened.callback(made[name].close)
        for source in precompile.VARIANTS:
            for variant, flags in bytecode.variants(source).items():
                compiled = compiler.compile_source(source, flags, cache=Paths.cache)
                for program in compiled.programs:
                    row = Row(source, variant, program, bcc)
                    counts[row] = _measure_one(compiled, program, made)
    return counts


def _measure_one(compiled: "Compiled", program: str, made: "dict[str, Map]") -> int:
    from ebpflb.kernel.programs import loader
    from ebpflb.kernel.programs.compiler import MAP_NUMBERS

    fds = {MAP_NUMBERS[name]: opened.fd for name, opened in made.items()}
    attach = loader.HOOK_TYPES[compiled.sections[program]]
    log = bytearray(_LOG_BYTES)
    code = loader.relocate(compiled.programs[program], fds)
    os.close(loader.prog_load(program, attach, code, log=log, log_level=_STATISTICS))
    return processed(log.split(b"\0", 1)[0].decode())


def stacks(folder: Path) -> Counts:
    """Return the bytes of stack of each program whose bytecode is in a folder."""
    from ebpflb.kernel.programs import compiler, precompile
    from vagrant.kernels import bytecode

    bcc = bytecode.bcc_of(folder)
    return {
        Row(source, variant, name, bcc): stack(code)
        for source, variants in precompile.VARIANTS.items()
        for variant, flags in variants.items()
        for name, code in (
            compiler.read_cached(compiler.entry(folder, source, flags, compiler.ANY_BCC)) or {}
        ).items()
    }


def stack(code: bytes) -> int:
    """Return how many bytes of the stack the program uses, from its lowest offset to r10.

    r10 points to the stack's upper end. A program reads and writes relative to r10 itself, or to a
    copy of r10 from which the compiler subtracts at once (uapi/linux/bpf_common.h).
    """
    lowest, copy = 0, None
    for opcode, registers, offset, immediate in struct.iter_unpack("<BBhi", code):
        kind, to, origin = opcode & 7, registers & 15, registers >> 4
        if (kind == _LDX and origin == _R10) or (kind in (_ST, _STX) and to == _R10):
            lowest = min(lowest, offset)
        elif opcode == _ADD_NUMBER and to == copy:
            lowest = min(lowest, immediate)
        copy = to if (opcode, origin) == (_MOVE, _R10) else None
    return -lowest


def complaints(counts: Counts, table: Table, column: str) -> list[str]:
    """Return a line for each program that is over budget, or has none."""
    found = []
    unit = "bytes of stack" if column == STACK else f"instructions processed on {column}"
    for row, count in counts.items():
        budget = table.get(row, {}).get(column)
        name = f"{row.source} {row.program} ({row.variant}), BCC {row.bcc}"
        if column == STACK and count > MOST_STACK:
            found.append(f"{name}: {count} {unit}, the most is {MOST_STACK}")
        elif not budget:
            found.append(f"{name}: {count} {unit}, not in the table yet: make verifier-table")
        elif count > int(budget) * GROWTH:
            found.append(f"{name}: {budget} -> {count} {unit}")
    return found


def read(path: Path = TABLE) -> Table:
    """Return the table; empty if there is none."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {Row(*(r.pop(field) for field in Row._fields)): r for r in rows}


def renewed(table: Table, measured: dict[str, Counts]) -> Table:
    """Return the table with these kernels' columns replaced; removed programs are dropped."""
    now: Table = {}
    for row in sorted({row for counts in measured.values() for row in counts} | set(table)):
        columns = {k: v for k, v in table.get(row, {}).items() if k not in measured}
        columns |= {k: str(counts[row]) for k, counts in measured.items() if row in counts}
        if any(columns.values()):
            now[row] = columns
    return now


def write(table: Table, columns: Sequence[str], path: Path = TABLE) -> None:
    """Write a line for each program, with these columns."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Row._fields, *columns])
        for row, numbers in table.items():
            writer.writerow([*row, *(numbers.get(column, "") for column in columns)])


def counts_of(table: Table, column: str) -> Counts:
    """Return one column."""
    return {row: int(numbers[column]) for row, numbers in table.items() if numbers.get(column)}


if __name__ == "__main__":
    for row, count in measure().items():
        print(f"{count:8} {row.source} {row.program} ({row.variant})")
