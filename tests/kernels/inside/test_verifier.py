# SPDX-License-Identifier: Apache-2.0
"""Every program, in every variant that this kernel takes, loads within the verifier's budget."""

import os
from pathlib import Path

import pytest

from ebpflb.kernel.programs import precompile
from tests.kit import once
from vagrant.kernels import bytecode, verifier

KERNEL = os.environ.get("LAB_KERNEL")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="bpf(2) is root's")


@pytest.fixture(scope="module")
def counts(shared: Path) -> verifier.Counts:
    with once.alone(shared):
        measured = verifier.measure()
    if KERNEL and "LAB_OUT" in os.environ:
        table = verifier.renewed({}, {KERNEL: measured})
        verifier.write(table, [KERNEL], Path(os.environ["LAB_OUT"], "verifier.csv"))
    return measured


@pytest.mark.extended
def test_everything_loads(counts: verifier.Counts) -> None:
    """Each source is loaded in each variant; none is left out."""
    loaded = {(row.source, row.variant) for row in counts}
    assert loaded == {(s, v) for s in precompile.VARIANTS for v in bytecode.variants(s)}
    assert min(counts.values()) > 1


@pytest.mark.skipif("LAB_RENEW" in os.environ, reason="the table is being renewed")
@pytest.mark.skipif(KERNEL is None, reason="this machine's kernel is none of the lab's")
def test_no_program_exceeds_its_budget(counts: verifier.Counts) -> None:
    """No program exceeds the table by more than a tenth; the message has both numbers."""
    assert KERNEL is not None
    over = verifier.complaints(counts, verifier.read(), KERNEL)
    assert not over, "\n".join(["over the verifier's budget", *over])
