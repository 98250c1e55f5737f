# SPDX-License-Identifier: Apache-2.0
"""`ebpflb demo` leaves nothing, whether it completes or is interrupted anywhere."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ebpflb.kernel.attach.cgroup_links import cgroup_root
from ebpflb.kernel.maps.state_dir import BPFFS
from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import NETNS
from tests.kit import terminal
from tests.kit.own_demo import EBPFLB, PREFIX

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
COLUMNS = 80
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


def processes(session: int) -> list[str]:
    """Return the living processes of a session; dead processes belong to init."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found.append(stat.read_text())
    fields = [(text, text.rpartition(")")[2].split()) for text in found]
    return [text for text, (state, _, _, its, *_) in fields if int(its) == session and state != "Z"]


def left(session: int) -> list[object]:
    """Return everything that is left of a demo."""
    return [*processes(session), *places()]


def places() -> list[Path]:
    """Return everything that has the demo's name."""
    folders = (NETNS, cgroup_root(), BPFFS, Path("/run"), Path("/tmp"))
    return [it for folder in folders for it in folder.glob(f"{PREFIX}*")]


def test_to_the_end() -> None:
    """All steps run on a terminal, connections reach every endpoint, and the exit status is 0."""
    with terminal.opened(COLUMNS) as (screen, out):
        demo = subprocess.Popen([*EBPFLB, "demo"], stdout=out, start_new_session=True)
        out.close()
        shown = terminal.read(screen)
    assert demo.wait(240) == 0
    said = re.sub(r"\x1b\[\d*m", "", shown)
    assert "\x1b[1m\n# set-up" in shown and "\x1b[36m  $ ebpflb explain" in shown, "colours"
    for step in STEPS:
        assert step in said
    for name in ("web-1", "web-2", "web-3", "web-4"):
        assert name in said
    assert "far-1 saw 192.0.2.1\n" in said, "policy Cluster sends us to the other node as the node"
    assert said.count("web-1 saw 198.51.100.7\n") == 3, "an endpoint here sees us, by any policy"
    assert "far-1 saw 198.51.100.7\n" in said, "we are handed to the other node"
    assert [line for line in said.splitlines() if len(line) > COLUMNS] == []
    log = section(said, "set-up").partition("of its log:\n")[2].splitlines()
    assert [line.split()[0] for line in log if line] == ["programs", "packet", "serving"]
    moved = section(said, "a load balancer address")
    assert re.findall(r"192.0.2.211 is answered for by node (\w+)", moved) == ["third", "other"]
    assert re.search(r"its cable is pulled -> first connection: \d+\.\d s", moved)
    assert "# everything is removed" in said
    wait_until("nothing is left", lambda: not left(demo.pid))
    assert "packet path: netfilter" in said, "the default engine: the bridge has hairpin mode"
    flow = r"TCP +\w+ +198.51.100.7:\d+ +192.0.2.1:30090 +10.244.1.1"
    assert re.search(flow, section(said, "a client outside"))


def section(said: str, heading: str) -> str:
    """Return the text after the heading with these words."""
    return next(it for it in said.split("\n# ") if heading in it.partition("\n")[0])


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
    assert (own.exists(), another.exists()) == (False, True)
    said = begin("--remove").communicate(timeout=120)[0]
    another.rmdir()
    assert said.splitlines()[-1] == f"{another.name} stays: it is of user {USER + 2}"
