# SPDX-License-Identifier: Apache-2.0
"""A run counts only if it reported its end; whatever happens, nothing stays behind."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vagrant.kernels import lane, machine
from vagrant.kernels.errors import LabError
from vagrant.kernels.listing import Kernel

KERNEL = Kernel("5.10", "suite", "archive")
JUNIT = '<testsuites><testsuite tests="3" failures="{}" errors="0" skipped="1"/></testsuites>'
Boot = Callable[..., machine.Result]


@pytest.fixture
def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Boot:
    """Run a machine that is a shell script; its folder is $out."""

    def boot(script: str, limit: float = 10.0) -> machine.Result:
        command = ["sh", "-c", f"out={tmp_path}; {script}"]
        monkeypatch.setattr(machine, "qemu_command", lambda *_, **_options: command)
        return machine.run(tmp_path, tmp_path, "true", limit=limit, say=lines.append)

    lines: list[str] = []
    return boot


def verdict(result: machine.Result) -> str:
    return lane.judge(KERNEL, result).error


def test_passed_and_skipped_tests_are_reported(boot: Boot) -> None:
    """If the status is 0 and there are results, the numbers of passed and skipped tests are
    reported.
    """
    result = boot(f"echo '{JUNIT.format(0)}' >$out/junit.xml; echo 0 >$out/status")
    error, summary = lane.judge(KERNEL, result)[1:]
    assert not error
    assert summary.startswith("2 passed, 1 skipped in ")


SKIPPED = '<testsuite tests="2" failures="0" errors="0" skipped="2"/>'
PANIC = "Kernel panic - not syncing: no root"
# What the machine leaves, and how its verdict begins.
BAD_RUNS = {
    "tests fail": (
        f"echo '{JUNIT.format(1)}' >$out/junit.xml; echo 1 >$out/status",
        "tests failed (1 passed, 1 failed, 1 skipped)",
    ),
    "nothing ran": (
        f"echo '{SKIPPED}' >$out/junit.xml; echo 0 >$out/status",
        "tests failed (2 skipped)",
    ),
    "no results": (
        ">$out/junit.xml; echo oh >$out/output; echo 0 >$out/status",
        "no results, status 0; its output ends:\n    oh",
    ),
    "half of the results": (
        "echo '<testsuites><testsuite tests=' >$out/junit.xml; echo oh >$out/output; "
        "echo 0 >$out/status",
        "no results, status 0; its output ends:\n    oh",
    ),
    "panic": (
        f"printf 'before\\n{PANIC}\\n' >$out/console",
        f"{PANIC}; the console ended with\n    before\n    {PANIC}",
    ),
    "no status": ("true", "the machine went off without a result;"),
    "QEMU complains": ("echo bad option >&2; exit 1", "bad option;"),
}


@pytest.mark.parametrize(("script", "said"), BAD_RUNS.values(), ids=BAD_RUNS)
def test_a_run_that_proves_nothing_is_named(boot: Boot, script: str, said: str) -> None:
    """The message has the run's traces, and the last lines of its console or output."""
    assert verdict(boot(script)).startswith(said)


def test_a_machine_without_an_end_is_stopped(boot: Boot) -> None:
    """A machine that does not end is stopped, and its last lines are shown."""
    result = boot("echo waiting >$out/console; exec sleep 1000", limit=0.5)
    assert verdict(result) == "no end after 0.5 s; the console ended with\n    waiting"


def test_folder_goes(tmp_path: Path) -> None:
    """A run's folder is removed, even after a failure, and so are those of killed runs."""
    runs = tmp_path / "runs"
    (runs / "999999999-6.1").mkdir(parents=True)
    with pytest.raises(LabError), machine.output_folder(runs, "5.10") as folder:
        assert folder.is_dir()
        raise LabError("x")
    assert not list(runs.iterdir())
