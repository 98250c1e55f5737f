# SPDX-License-Identifier: Apache-2.0
"""The bytecode that is brought along, which was compiled on another machine, loads here."""

import pytest

from ebpflb.kernel.programs import compiler
from vagrant.kernels import bytecode


def test_loads(capsys: pytest.CaptureFixture[str]) -> None:
    """Every program of every variant that was compiled."""
    if not compiler.BROUGHT.is_dir():
        pytest.skip("no bytecode was brought along")
    bytecode.load_all(compiler.BROUGHT)
    assert int(capsys.readouterr().out.split()[0]) > 50
