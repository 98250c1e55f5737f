# SPDX-License-Identifier: Apache-2.0
"""The budgets of programs: a tenth more is allowed, and the complaint has both numbers."""

import struct
from pathlib import Path

import pytest

from ebpflb.kernel.programs import precompile
from vagrant.kernels import listing, verifier
from vagrant.kernels.verifier import Row

ROW = Row("hooks/socket.c", "plain", "connect4", "0.26.0")
BCCS = ("0.26.0", "0.31.0")  # of Debian 12 and 13: LLVM 14 and 19


def test_summary() -> None:
    """The number is the verifier's own."""
    log = "processed 2983 insns (limit 1000000) max_states_per_insn 4 total_states 211\n"
    assert verifier.processed(log) == 2983
    with pytest.raises(ValueError, match="no summary"):
        verifier.processed("")


@pytest.mark.parametrize(("count", "fits"), [(900, True), (1100, True), (1101, False)])
def test_growth(count: int, fits: bool) -> None:
    found = verifier.complaints({ROW: count}, {ROW: {"5.10": "1000"}}, "5.10")
    line = f"hooks/socket.c connect4 (plain), BCC 0.26.0: 1000 -> {count} instructions"
    assert found == ([] if fits else [f"{line} processed on 5.10"])


@pytest.mark.parametrize(("budget", "count", "fits"), [(400, 440, True), (400, 441, False)])
def test_stack_grows(budget: int, count: int, fits: bool) -> None:
    found = verifier.complaints({ROW: count}, {ROW: {"stack": str(budget)}}, verifier.STACK)
    line = f"hooks/socket.c connect4 (plain), BCC 0.26.0: {budget} -> {count} bytes of stack"
    assert found == ([] if fits else [line])


def test_stack_has_a_limit() -> None:
    """Beyond MOST_STACK no budget helps: another compiler needs room below 512 bytes."""
    count = verifier.MOST_STACK + 8
    [line] = verifier.complaints({ROW: count}, {ROW: {"stack": str(count)}}, verifier.STACK)
    assert line.endswith("456 bytes of stack, the most is 448")


@pytest.mark.parametrize(
    ("instructions", "used"),
    [
        ([(0x7B, 0x1A, -64, 0), (0x79, 0xA1, -8, 0)], 64),  # *(u64 *)(r10 - 64) = r1; r1 = ...
        ([(0x62, 0x0A, -20, 7)], 20),  # *(u32 *)(r10 - 20) = 7
        ([(0x79, 0xA1, -40, 0)], 40),  # r1 = *(u64 *)(r10 - 40)
        ([(0xBF, 0xA2, 0, 0), (0x07, 0x02, 0, -96)], 96),  # r2 = r10; r2 += -96
        ([(0xBF, 0xA2, 0, 0), (0x07, 0x03, 0, -96)], 0),  # r3 is something else
        ([(0x7B, 0x16, -64, 0), (0x07, 0x02, 0, -96)], 0),  # *(u64 *)(r6 - 64) = r1; r2 += -96
    ],
)
def test_stack(instructions: list[tuple[int, int, int, int]], used: int) -> None:
    """The stack is counted from r10 down."""
    assert verifier.stack(b"".join(struct.pack("<BBhi", *each) for each in instructions)) == used


def test_not_there() -> None:
    """A program or a kernel without budget is a complaint, and says how to get one."""
    for table in ({}, {ROW: {"6.1": "1000"}}):
        [line] = verifier.complaints({ROW: 1}, table, "5.10")
        assert line.endswith("not in the table yet: make verifier-table")


def test_renewed(tmp_path: Path) -> None:
    """Measured columns are replaced, others stay, programs that are gone go."""
    gone = ROW._replace(program="gone")
    table = {ROW: {"5.10": "1", "6.1": "2"}, gone: {"5.10": "3", "6.1": ""}}
    now = verifier.renewed(table, {"5.10": {ROW: 7}})
    assert now == {ROW: {"5.10": "7", "6.1": "2"}}
    verifier.write(now, ["5.10", "6.1"], tmp_path / "table.csv")
    assert verifier.read(tmp_path / "table.csv") == now


def test_table() -> None:
    """The checked-in table has a number for every source, BCC, and kernel of the list."""
    table = verifier.read()
    for column in (verifier.STACK, *listing.kernels()):
        found = {(row.source, row.bcc) for row in verifier.counts_of(table, column)}
        assert found == {(source, bcc) for source in precompile.VARIANTS for bcc in BCCS}


def test_stacks_in_the_table_have_room() -> None:
    """Every program, in every variant, by both BCCs."""
    stacks = verifier.counts_of(verifier.read(), verifier.STACK)
    programs = {row[:3] for row in stacks}
    assert set(stacks) == {Row(*each, bcc) for each in programs for bcc in BCCS}
    assert max(stacks.values()) <= verifier.MOST_STACK
