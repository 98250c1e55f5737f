# SPDX-License-Identifier: Apache-2.0
"""oom_score_adj, on a fake /proc."""

import logging
from pathlib import Path

import pytest

from ebpflb.node import process


def test_oom_score_adj(tmp_path: Path) -> None:
    """It is written as it was chosen."""
    path = tmp_path / "oom_score_adj"
    path.write_text("0\n")
    process.adjust_oom_score(-999, path)
    assert path.read_text() == "-999\n"


def test_not_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where it cannot be set that is said, and nothing else happens."""
    caplog.set_level(logging.INFO)
    process.adjust_oom_score(-999, tmp_path / "missing")
    assert caplog.messages == ["oom_score_adj: not set to -999: No such file or directory"]
