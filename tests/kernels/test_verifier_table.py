# SPDX-License-Identifier: Apache-2.0
"""The verifier's budget: a tenth more is allowed, and the complaint has both numbers."""

from pathlib import Path

import pytest

from ebpflb.kernel.programs import precompile
from vagrant.kernels import listing, verifier
from vagrant.kernels.verifier import Row

ROW = Row("hooks/socket.c", "plain", "connect4")


def test_summary() -> None:
    """The number is the verifier's own."""
    log = "processed 2983 insns (limit 1000000) max_states_per_insn 4 total_states 211\n"
    assert verifier.processed(log) == 2983
    with pytest.raises(ValueError, match="no summary"):
        verifier.processed("")


@pytest.mark.parametrize(("count", "fits"), [(900, True), (1100, True), (1101, False)])
def test_growth(count: int, fits: bool) -> None:
    found = verifier.complaints({ROW: count}, {ROW: {"5.10": "1000"}}, "5.10")
    line = f"hooks/socket.c connect4 (plain) on 5.10: 1000 -> {count} instructions processed"
    assert found == ([] if fits else [line])


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
    """The checked-in table has a number for every source on every kernel of the list."""
    table = verifier.read()
    for kernel in listing.kernels():
        found = {row.source for row in verifier.counts_of(table, kernel)}
        assert found == set(precompile.VARIANTS)
