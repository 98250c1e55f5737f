# SPDX-License-Identifier: Apache-2.0
"""Vagrant's machines, as far as they can be tested without starting one."""

import os
import subprocess
from pathlib import Path

import pytest

from vagrant.kernels import __main__ as commands
from vagrant.kernels import lane, lane_tests, listing, machine

VAGRANT = Path(listing.__file__).parents[1]
SCRIPTS = sorted(
    [*VAGRANT.glob("provision/*"), *(VAGRANT / name for name in ("bcc", "box", "in-namespace"))]
)


@pytest.mark.parametrize("brought", [True, False])
def test_the_tests_run_in_a_machine_of_vagrant(
    brought: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a Vagrant machine the same tests run, with bytecode that is installed or compiled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EBPFLB_TEST_LOAD", raising=False)
    monkeypatch.setattr(lane, "OUT", str(tmp_path / "out"))
    monkeypatch.setattr(machine, "is_root", lambda: None)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$LAB_KERNEL $EBPFLB_TEST_LOAD $*" >>ran\n')
    python.chmod(0o755)
    monkeypatch.setattr(lane, "test_python", lambda: str(python))
    if brought:
        (tmp_path / "bytecode").mkdir()
    assert commands.main(["here", "5.10"]) == 0
    *before, tests = (tmp_path / "ran").read_text().splitlines()
    assert before == ([] if brought else ["  -m ebpflb.kernel.programs.precompile"])
    assert tests.startswith(f"5.10 {lane.LOAD} -m pytest ")
    assert tests.endswith(" ".join(lane_tests.TESTS))


def test_tests_of_the_lane_exist() -> None:
    """All listed tests exist, and no test is in both lists."""
    usual, more = (
        [word for word in words if not word.startswith("--")]
        for words in (lane_tests.ALL_TESTS, lane_tests.MORE)
    )
    assert [it for it in (*usual, *more) if not (VAGRANT.parent / it).exists()] == []
    assert not set(usual) & set(more)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_valid_and_executable(script: Path) -> None:
    """Every script of the lab is executable, and bash can parse it."""
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[1] == "# SPDX-License-Identifier: Apache-2.0"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert not done.stderr
