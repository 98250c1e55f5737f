# SPDX-License-Identifier: Apache-2.0
"""The report of `make soak`, and a short one."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.simulation.schedules import Failure
from tests.simulation.steps import Step
from tests.soak.__main__ import Simulated, report, seconds
from tests.soak.client import step_of
from tests.soak.connections import Counts

ROOT = Path(__file__).parents[2]


def counted(**errors: int) -> Counts:
    counts = Counts()
    steps = {step_of(0.001): 98, step_of(0.1): 2}
    counts.add("tcp", {"answers": {"web-1": 100}, "errors": errors, "steps": steps})
    return counts


def test_percentiles() -> None:
    """Percentiles are exact to five per cent."""
    assert counted().percentile(0.5) == pytest.approx(1.0, rel=0.05)
    assert counted().percentile(0.99) == pytest.approx(100.0, rel=0.05)
    assert Counts().percentile(0.5) == 0.0


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("10m", 600), ("8h", 28800)])
def test_times(text: str, expected: float) -> None:
    assert seconds(text) == expected


def test_no_time() -> None:
    with pytest.raises(click.BadParameter, match="10m"):
        seconds("10 minutes")


def test_nothing_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """The report has all that was done."""
    assert report(Simulated(), counted(), 7, 60.0)
    assert "from seed 7 on" in capsys.readouterr().out


def test_a_lost_request_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A lost request is a failure, and is named."""
    assert not report(Simulated(), counted(ECONNREFUSED=1), 7, 60.0)
    assert "tcp: ECONNREFUSED: 1 times" in capsys.readouterr().out


def test_a_failed_schedule_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A failed schedule is a failure; its seed and its steps are named."""
    simulated = Simulated()
    simulated.failures.append(str(Failure(9, (Step("die", (1, 0)),), "Wrong: this")))
    assert not report(simulated, counted(), 7, 60.0)
    assert "EBPFLB_SEED=9" in (said := capsys.readouterr().out) and "die(1, 0)" in said


@pytest.mark.extended
def test_a_short_one() -> None:
    """Real traffic and schedules, nothing lost, exit status 0."""
    command = [sys.executable, "-m", "tests.soak", "--for", "5s", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout and " 0 lost" in done.stdout
