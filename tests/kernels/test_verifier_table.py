# SPDX-License-Identifier: Apache-2.0
"""The budgets of programs: a tenth more is allowed, and the message has both numbers."""

import pytest

from ebpflb.kernel.programs import precompile
from vagrant.kernels import listing, verifier
from vagrant.kernels.verifier import Row

BEFORE_SOCK_DESTROY = {"5.10", "6.1"}  # Linux 6.5
ROW = Row("hooks/socket.c", "plain", "connect4", "0.26.0")
BCCS = ("0.26.0", "0.31.0")  # of Debian 12 and 13: LLVM 14 and 19


def test_the_number_is_the_verifiers_own() -> None:
    log = "processed 2983 insns (limit 1000000) max_states_per_insn 4 total_states 211\n"
    assert verifier.processed(log) == 2983
    with pytest.raises(ValueError, match="no summary"):
        verifier.processed("")


@pytest.mark.parametrize(("count", "fits"), [(900, True), (1100, True), (1101, False)])
def test_a_tenth_of_growth_is_allowed(count: int, fits: bool) -> None:
    found = verifier.complaints({ROW: count}, {ROW: {"5.10": "1000"}}, "5.10")
    line = f"hooks/socket.c connect4 (plain), BCC 0.26.0: 1000 -> {count} instructions"
    assert found == ([] if fits else [f"{line} processed on 5.10"])


@pytest.mark.parametrize(("budget", "count", "fits"), [(400, 440, True), (400, 441, False)])
def test_stack_grows(budget: int, count: int, fits: bool) -> None:
    found = verifier.complaints({ROW: count}, {ROW: {"stack": str(budget)}}, verifier.STACK)
    line = f"hooks/socket.c connect4 (plain), BCC 0.26.0: {budget} -> {count} bytes of stack"
    assert found == ([] if fits else [line])


def test_stack_has_a_limit() -> None:
    """Beyond MOST_STACK a program fails whatever its budget: another compiler needs room below 512
    bytes.
    """
    count = verifier.MOST_STACK + 8
    [line] = verifier.complaints({ROW: count}, {ROW: {"stack": str(count)}}, verifier.STACK)
    assert line.endswith("456 bytes of stack, the most is 448")


def test_not_there() -> None:
    """A program or a kernel without a budget fails, with instructions for adding one."""
    for table in ({}, {ROW: {"6.1": "1000"}}):
        [line] = verifier.complaints({ROW: 1}, table, "5.10")
        assert line.endswith("not in the table yet: make verifier-table")


def test_the_table_is_complete() -> None:
    """The checked-in table has a number for every source, BCC, and kernel of the list."""
    table = verifier.read()
    for column in (verifier.STACK, *listing.kernels()):
        found = {(row.source, row.bcc) for row in verifier.counts_of(table, column)}
        left_out = {precompile.QUIET_SOCKET} if column in BEFORE_SOCK_DESTROY else set()
        sources = precompile.VARIANTS.keys() - left_out
        assert found == {(source, bcc) for source in sources for bcc in BCCS}


def test_stacks_in_the_table_have_room() -> None:
    """Every program leaves room on the stack, in every variant, with both BCCs."""
    stacks = verifier.counts_of(verifier.read(), verifier.STACK)
    programs = {row[:3] for row in stacks}
    assert set(stacks) == {Row(*each, bcc) for each in programs for bcc in BCCS}
    assert max(stacks.values()) <= verifier.MOST_STACK
