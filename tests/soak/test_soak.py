# SPDX-License-Identifier: Apache-2.0
"""The report of `make soak`, and a short soak."""

import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest

from bench import history, timeline
from bench.history import Applied, Endpoints, Fault, Open, Record, Request
from tests.simulation.schedules import Failure
from tests.simulation.steps import Step
from tests.soak.__main__ import Simulated, report, seconds
from tests.soak.connections import Counts

ROOT = Path(__file__).parents[2]


GOOD: tuple[Record, ...] = (
    Endpoints(1, "web", 1, frozenset({"a", "b"})),
    Endpoints(1, "other", 1, frozenset({"x"})),
    Applied(2, 1),
    Request(3, 3.1, "first", "web", "a", sticky=True),
    Request(4, 4.1, "second", "web", "b"),
    Endpoints(5, "web", 2, frozenset({"b"})),
    Request(5.1, 5.2, "second", "web", "a"),
    Applied(6, 2),
    Request(7, 7.1, "first", "web", "b", sticky=True),
    Fault(8, 9, "an entry is removed", "other"),
    Request(8.9, 9.2, "third", "other", error="ECONNREFUSED"),
    Fault(8, 60, "the agent is killed"),
    Endpoints(9, "web", 3, frozenset({"b", "c"})),
    Open(9, 9.1, "open"),
    Applied(61, 3),
    Request(62, 62.1, "first", "web", "b", sticky=True),
)


@pytest.mark.parametrize(
    ("kind", "added"),
    [
        (history.FAILED, Request(8.5, 8.6, "second", "web", error="ETIMEDOUT")),
        (history.FAILED, Request(9.1, 9.2, "third", "other", error="ECONNREFUSED")),
        (history.FOREIGN, Request(3, 3.1, "second", "web", "x")),
        (history.REMOVED, Request(6.1, 6.2, "second", "web", "a")),
        (history.MOVED, Request(62.2, 62.3, "first", "web", "c", sticky=True)),
        (history.NOT_IN_FORCE, Endpoints(10, "web", 4, frozenset({"b"}))),
        (history.ENDED, Open(10, 10.1, "open", "ECONNRESET")),
    ],
)
def test_a_broken_promise(kind: str, added: Record) -> None:
    """Each broken promise is found and shown; a fault excuses only the Services that it may
    affect.
    """
    late = [Applied(95, 4)] if isinstance(added, Endpoints) else []
    assert history.check(GOOD) == []
    (broken,) = history.check([*GOOD, added, *late])
    assert broken.kind == kind
    assert f"<td>{kind}</td><td>" in timeline.page([*GOOD, added], [broken])


def test_a_history_is_kept(tmp_path: Path) -> None:
    """A history reads back as written, and its timeline names each fault."""
    history.write(tmp_path / "history", GOOD)
    assert history.read(tmp_path / "history") == list(GOOD)
    said = timeline.page(GOOD, [])
    assert "no promise was broken" in said and "the agent is killed</title>" in said


def counted(error: str = "") -> Counts:
    took = [0.001] * 98 + [0.1] * 2
    requests = [Request(0, each, "tcp", "web", "a") for each in took]
    if error:
        requests.append(msgspec.structs.replace(requests[0], endpoint="", error=error))
    counts = Counts()
    counts.add([*requests], history.check([*GOOD, *requests]) if error else [])
    return counts


def test_percentiles_are_exact_to_five_per_cent() -> None:
    assert counted().percentile(0.5) == pytest.approx(1.0, rel=0.05)
    assert counted().percentile(0.99) == pytest.approx(100.0, rel=0.05)
    assert Counts().percentile(0.5) == 0.0


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("10m", 600), ("8h", 28800)])
def test_a_duration_has_a_unit(text: str, expected: float) -> None:
    assert seconds(text) == expected


def test_no_time() -> None:
    with pytest.raises(click.BadParameter, match="10m"):
        seconds("10 minutes")


def test_nothing_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """The report has all counts."""
    assert report(Simulated(), counted(), 7, 60.0)
    assert "from seed 7 on" in capsys.readouterr().out


def test_a_lost_request_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A lost request is a failure, and is named."""
    assert not report(Simulated(), counted("ECONNREFUSED"), 7, 60.0)
    assert f"tcp: {history.FAILED}: 1 times" in capsys.readouterr().out


def test_a_failed_schedule_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A failed schedule is a failure; its seed and its steps are named."""
    simulated = Simulated()
    simulated.failures.append(str(Failure(9, (Step("die", (1, 0)),), "Wrong: this")))
    assert not report(simulated, counted(), 7, 60.0)
    assert "EBPFLB_SEED=9" in (said := capsys.readouterr().out) and "die(1, 0)" in said


@pytest.mark.extended
def test_a_short_one() -> None:
    """In a short soak, real traffic and schedules run, nothing is lost, and the exit status is
    0.
    """
    command = [sys.executable, "-m", "tests.soak", "--for", "5s", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout and " 0 broken promises" in done.stdout
