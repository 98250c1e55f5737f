# SPDX-License-Identifier: Apache-2.0
"""The Makefile installs Debian's packages, waits for another apt, and fails if it cannot
install.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKED = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)"
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


class Apt:
    """Fake tools of Debian, without an archive; ``asked`` has a line for each call of apt-get."""

    def __init__(self, folder: Path) -> None:
        self.tools, self.venv, self._asked = folder / "tools", folder / "venv", folder / "asked"
        self.tools.mkdir()
        self.venv.mkdir()
        self.answers("dpkg", "exit 1")
        self.answers("sleep", "")

    def answers(self, tool: str, script: str) -> None:
        (self.tools / tool).write_text(f"#!/bin/sh\necho {tool} $* >>{self._asked}\n{script}\n")
        (self.tools / tool).chmod(0o755)

    @property
    def asked(self) -> list[str]:
        lines = self._asked.read_text().splitlines()
        return [line for line in lines if line.startswith("apt-get")]

    def make(self) -> "subprocess.CompletedProcess[str]":
        """Run make for the file that marks the packages as installed."""
        path = f"{self.tools}:{os.environ['PATH']}"
        variables = [f"VENV={self.venv}", "PYTHON=true", f"PATH={path}"]
        command = ["make", "--no-print-directory", *variables, str(self.done)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    @property
    def done(self) -> Path:
        return self.venv / "packages-run"


@pytest.fixture
def apt(tmp_path: Path) -> Apt:
    return Apt(tmp_path)


@pytest.mark.parametrize("step", ["update", "install"])
def test_a_failed_apt_is_a_failure_and_is_tried_again(apt: Apt, step: str) -> None:
    """The output of a failed apt is shown, and no message says that the packages are installed."""
    apt.answers("apt-get", f'case "$*" in *{step}*) echo "no archive" >&2; exit 100;; esac')
    failed = apt.make()
    assert failed.returncode and "no archive" in failed.stderr
    assert not apt.done.exists()
    apt.answers("apt-get", "")
    assert apt.make().returncode == 0 and apt.done.exists()


def test_another_apt_is_waited_for(apt: Apt, tmp_path: Path) -> None:
    """Make waits for both locks, of the lists and of dpkg."""
    held = tmp_path / "held"
    held.touch()
    lists = f'*update*) rm {held} 2>/dev/null && {{ echo "{LOCKED}" >&2; exit 100; }}; exit 0'
    apt.answers("apt-get", f'case "$*" in {lists};; esac')
    done = apt.make()
    assert done.returncode == 0, done.stderr
    *updates, install = apt.asked
    assert updates == ["apt-get update -qq"] * 2
    assert "DPkg::Lock::Timeout=600" in install
