# SPDX-License-Identifier: Apache-2.0
"""`ebpflb demo` leaves nothing, whether it completes or is interrupted anywhere."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from tests.kit.own_demo import CODE, EBPFLB, PREFIX, left, places, processes

STEPS = [
    "# set-up",
    "serving",
    "# 100 connections",
    "# the Service is scaled",
    "# what the node serves",
    "# a client outside",
    "# a load balancer address",
    "# the agent is killed",
]
# Gets SIGTERM when it has begun to make this pod's namespace, or to remove any, before it knows the
# process that does so.
LAST = "web-1"
INTERRUPTED = f"""
import os, signal, subprocess
fork = subprocess._fork_exec
def interrupted(words, *others):
    started = fork(words, *others)
    if "netns" in words and ("delete" in words or words[-1].endswith("{LAST}")):
        os.kill(os.getpid(), signal.SIGTERM)
    return started
subprocess._fork_exec = interrupted
{CODE}"""
USER = int(os.environ.get("SUDO_UID") or os.geteuid())


def begin(*words: str) -> "subprocess.Popen[str]":
    """Start a demo in its own session, as in a terminal; only this demo is touched."""
    return subprocess.Popen(
        [*EBPFLB, "demo", *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.fixture(autouse=True)
def swept() -> Iterator[None]:
    """Remove the remains of a failed test."""
    yield
    if places():
        begin("--remove").communicate(timeout=120)


@pytest.mark.extended
def test_to_the_end() -> None:
    """Without --keep everything is removed at the end; tests/docs/test_guide.py has the rest."""
    demo = begin()
    said, _ = demo.communicate(timeout=240)
    assert demo.returncode == 0 and "# everything is removed" in said
    wait_until("nothing is left", lambda: not left(demo.pid))


@pytest.mark.extended
@pytest.mark.parametrize(("number", "step"), list(enumerate(STEPS)), ids=STEPS)
def test_an_interruption_leaves_nothing(number: int, step: str) -> None:
    """Wherever the demo is interrupted, the exit status is 1 and everything is removed."""
    demo = begin()
    assert demo.stdout
    assert any(step in line for line in demo.stdout), "it has ended before"
    demo.send_signal((signal.SIGTERM, signal.SIGINT)[number % 2])
    demo.communicate(timeout=240)
    assert demo.returncode == 1
    wait_until("nothing is left", lambda: not left(demo.pid))


def test_interrupted_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left if a process that makes a namespace is slow, and the demo is interrupted
    before it knows that process, and again while it removes everything.
    """
    slow = tmp_path / "ip"
    slow.write_text(f"""#!/bin/sh
case "$2 $3" in "add "*{LAST}) sleep 0.3;; esac
exec {shutil.which("ip")} "$@"
""")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = [sys.executable, "-c", INTERRUPTED, "demo"]
    demo = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    assert demo.wait(120) == 1
    wait_until("its processes have ended", lambda: not processes(demo.pid))
    assert places() == []


@pytest.mark.extended
def test_killed_and_swept() -> None:
    """--remove removes a demo that was killed, also if two processes call it at once."""
    demo = begin()
    assert demo.stdout
    assert any(STEPS[2] in line for line in demo.stdout), "it has ended before"
    demo.kill()
    demo.communicate(timeout=240)
    assert places()
    removing = [begin("--remove") for _ in range(4)]
    said = [each.communicate(timeout=120)[0] for each in removing]
    assert [each.returncode for each in removing] == [0] * 4
    assert sum(f"removed: {PREFIX}-{USER}-{demo.pid}" in text for text in said) == 1, said
    wait_until("nothing is left", lambda: not left(demo.pid))
    assert begin("--remove").communicate(timeout=120)[0] == "no demo was found\n"


def test_without_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing tool is named with its package, before anything is created."""
    monkeypatch.setenv("PATH", "/nowhere")
    done = subprocess.run([*EBPFLB, "demo"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("ip(8): apt install iproute2\n")


def test_another_users_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's demo stays, even with sudo; a demo first says what it removes."""
    own, another = (Path(f"/run/{PREFIX}-{user}-1") for user in (USER + 1, USER + 2))
    own.mkdir()
    another.mkdir()
    monkeypatch.setenv("SUDO_UID", str(USER + 1))
    demo = begin()
    assert demo.stdout and demo.stdout.readline().startswith(f"removed: {own.name}, left by an")
    demo.terminate()
    demo.communicate(timeout=120)
    wait_until("its own and the former one are removed", lambda: places() == [another])
    said = begin("--remove").communicate(timeout=120)[0]
    another.rmdir()
    assert said.splitlines()[-1] == f"{another.name} stays: it is of user {USER + 2}"
