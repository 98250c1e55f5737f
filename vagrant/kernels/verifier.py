# SPDX-License-Identifier: Apache-2.0
"""The verifier's budget: how many instructions it processes for each program, on each kernel.

verifier.csv is checked in, a column for each kernel. A program that takes a tenth more than
there, or is not there, fails the lane: growth is meant or it is noticed. `make verifier-table`
renews the table.

    python -m vagrant.kernels.verifier      the numbers of this machine's own kernel
"""

import csv
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ebpflb.kernel.maps.bpf_map import Map
    from ebpflb.kernel.programs.compiler import Compiled

TABLE = Path(__file__).with_name("verifier.csv")
GROWTH = 1.10
_STATISTICS = 4  # log_level: only the summary
_LOG_BYTES = 4096


class Row(NamedTuple):
    """One program in one variant."""

    source: str
    variant: str
    program: str


Counts = dict[Row, int]
Table = dict[Row, dict[str, str]]


def processed(log: str) -> int:
    """From the verifier's summary: processed 1234 insns (limit 1000000) ..."""
    found = re.search(r"processed (\d+) insns", log)
    if found is None:
        raise ValueError(f"the verifier's log has no summary: {log!r}")
    return int(found[1])


def measure() -> Counts:
    """Loads every program in every variant that this kernel takes, and asks what it cost.

    Raises KernelError where one of them is refused.
    """
    from ebpflb.kernel.maps import bpf_map, creation, layout
    from ebpflb.kernel.programs import compiler, precompile
    from ebpflb.options import Paths
    from vagrant.kernels import bytecode

    counts: Counts = {}
    with ExitStack() as opened:
        made: dict[str, Map] = {}
        for name, spec in layout.PROGRAM_MAPS.items():
            made[name] = bpf_map.open_map(spec, creation.create_map(spec))
            opened.callback(made[name].close)
        for source in precompile.VARIANTS:
            for variant, flags in bytecode.variants(source).items():
                compiled = compiler.compile_source(source, flags, cache=Paths.cache)
                for program in compiled.programs:
                    counts[Row(source, variant, program)] = _measure_one(compiled, program, made)
    return counts


def _measure_one(compiled: "Compiled", program: str, made: "dict[str, Map]") -> int:
    from ebpflb.kernel import bpf
    from ebpflb.kernel.programs import loader
    from ebpflb.kernel.programs.compiler import MAP_NUMBERS

    fds = {MAP_NUMBERS[name]: opened.fd for name, opened in made.items()}
    attach = loader.HOOK_TYPES[compiled.sections[program]]
    log = bytearray(_LOG_BYTES)
    fd = bpf.prog_load(
        name=program,
        program_type=attach.program_type,
        attach_type=attach.attach_type,
        code=loader.relocate(compiled.programs[program], fds),
        log=log,
        log_level=_STATISTICS,
    )
    os.close(fd)
    return processed(log.split(b"\0", 1)[0].decode())


def complaints(counts: Counts, table: Table, kernel: str) -> list[str]:
    """A line for each program that is over budget, or has none."""
    found = []
    for row, count in counts.items():
        budget = table.get(row, {}).get(kernel)
        name = f"{row.source} {row.program} ({row.variant}) on {kernel}"
        if not budget:
            found.append(f"{name}: {count}, not in the table yet: make verifier-table")
        elif count > int(budget) * GROWTH:
            found.append(f"{name}: {budget} -> {count} instructions processed")
    return found


def read(path: Path = TABLE) -> Table:
    """The table; empty where there is none."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {Row(r.pop("source"), r.pop("variant"), r.pop("program")): r for r in rows}


def renewed(table: Table, measured: dict[str, Counts]) -> Table:
    """The table with the columns of these kernels replaced; programs that are gone are dropped."""
    now: Table = {}
    for row in sorted({row for counts in measured.values() for row in counts} | set(table)):
        columns = {k: v for k, v in table.get(row, {}).items() if k not in measured}
        columns |= {k: str(counts[row]) for k, counts in measured.items() if row in counts}
        if any(columns.values()):
            now[row] = columns
    return now


def write(table: Table, kernels: Iterable[str], path: Path = TABLE) -> None:
    """A line for each program, a column for each kernel."""
    kernels = list(kernels)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Row._fields, *kernels])
        for row, columns in table.items():
            writer.writerow([*row, *(columns.get(kernel, "") for kernel in kernels)])


def counts_of(table: Table, kernel: str) -> Counts:
    """One kernel's column."""
    return {row: int(columns[kernel]) for row, columns in table.items() if columns.get(kernel)}


if __name__ == "__main__":
    for row, count in measure().items():
        print(f"{count:8} {row.source} {row.program} ({row.variant})")
