# SPDX-License-Identifier: Apache-2.0
"""A run counts only if it said how it ended; whatever happens, nothing stays behind."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    """A machine that is a shell script; its folder is $out."""

    def boot(script: str, limit: float = 10.0) -> machine.Result:
        command = ["sh", "-c", f"out={tmp_path}; {script}"]
        monkeypatch.setattr(machine, "qemu_command", lambda *_, **_options: command)
        return machine.run(tmp_path, tmp_path, "true", limit=limit, say=lines.append)

    lines: list[str] = []
    return boot


def verdict(result: machine.Result) -> str:
    return lane.judge(KERNEL, result).error


def test_good(boot: Boot) -> None:
    """A status of 0 and results: what passed and was skipped is said."""
    result = boot(f"echo '{JUNIT.format(0)}' >$out/junit.xml; echo 0 >$out/status")
    error, summary = lane.judge(KERNEL, result)[1:]
    assert not error
    assert summary.startswith("2 passed, 1 skipped in ")


def test_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is passed on once and whole, the last one too."""
    script = f"cd {tmp_path}; printf 'one\\ntw' >output; sleep 0.3; printf 'o\\nend' >>output"
    monkeypatch.setattr(machine, "qemu_command", lambda *_, **_options: ["sh", "-c", script])
    lines: list[str] = []
    machine.run(tmp_path, tmp_path, "true", limit=10, say=lines.append)
    assert lines == ["one", "two", "end"]


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
    """Its traces and the last words of its console or output name it."""
    assert verdict(boot(script)).startswith(said)


def test_hang(boot: Boot) -> None:
    """A machine that goes on for ever is ended, and its last words are shown."""
    result = boot("echo waiting >$out/console; exec sleep 1000", limit=0.5)
    assert verdict(result) == "no end after 0.5 s; the console ended with\n    waiting"


def test_folder_goes(tmp_path: Path) -> None:
    """The folder of a run goes with it, also when it fails, and so do those of killed runs."""
    runs = tmp_path / "runs"
    (runs / "999999999-6.1").mkdir(parents=True)
    with pytest.raises(LabError), machine.output_folder(runs, "5.10") as folder:
        assert folder.is_dir()
        raise LabError("x")
    assert not list(runs.iterdir())


RUN = """
import sys
from pathlib import Path
from vagrant.kernels import machine
machine.end_on_signals()
machine.acceleration = lambda: ()
machine.tool = lambda name, package: {"setpriv": "setpriv"}.get(name, sys.argv[2])
with machine.output_folder(Path(sys.argv[1]), "5.10") as out:
    print("ready", flush=True)
    machine.run(out, out, "true", limit=60, say=print)
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run whose QEMU is a script that sleeps and leaves its pid."""
    qemu = tmp_path / "qemu"
    qemu.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 60\n")
    qemu.chmod(0o755)
    command = [sys.executable, "-c", RUN, str(tmp_path / "runs"), str(qemu)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_interrupted(running: "subprocess.Popen[str]", tmp_path: Path, how: signal.Signals) -> None:
    """QEMU ends with us however we end; the folder too, except after SIGKILL: the next run's."""
    pid = _wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    running.send_signal(how)
    running.wait(60)
    assert _wait(lambda: not _alive(int(pid)))
    left = list((tmp_path / "runs").iterdir())
    assert bool(left) == (how == signal.SIGKILL)
    with machine.output_folder(tmp_path / "runs", "next"):
        assert len(list((tmp_path / "runs").iterdir())) == 1


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def _wait(value: Callable[[], object]) -> str:
    until = time.monotonic() + 60
    while not (found := value()) and time.monotonic() < until:
        time.sleep(0.02)
    assert found
    return str(found)
