# SPDX-License-Identifier: Apache-2.0
"""Tests start most agents as forks of a process that has imported ``ebpflb`` (tests/kit/forked.py).

What such a process does must be what one does that was started anew.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import NETNS
from tests.kit import forked

COMMANDS = {
    "a success": ("--version",),
    "a usage error": ("run", "--no-such-option"),
    "an error of ours": ("run", "--config", "/nowhere"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_it_says_the_same(words: tuple[str, ...]) -> None:
    """The same status and output."""
    command = [sys.executable, "-P", "-m", "ebpflb", *words]
    anew = subprocess.run(command, capture_output=True, text=True, check=False)
    it = forked.run(*words)
    assert (it.returncode, it.stdout, it.stderr) == (anew.returncode, anew.stdout, anew.stderr)


def test_it_is_a_process_of_its_own(own_netns: str, tmp_path: Path) -> None:
    """In the directory and the network namespace that it was to have; a signal ends it alone."""
    waits = tmp_path / "config.conf"
    os.mkfifo(waits)
    with (tmp_path / "log").open("w") as log:
        it = forked.start(
            ["run", "--config", str(waits)],
            netns=own_netns,
            cwd=str(tmp_path),
            env={"PATH": "/usr/bin:/bin"},
            stdout=log,
            stderr=log,
        )
    of = Path(f"/proc/{it.pid}")
    try:
        wait_until("it is there", lambda: (of / "cwd").resolve() == tmp_path, 60)
        assert (of / "ns/net").stat().st_ino == (NETNS / own_netns).stat().st_ino
        assert it.poll() is None
    finally:
        it.send_signal(signal.SIGKILL)
    assert it.wait(120) == -signal.SIGKILL
    assert forked.run("--version").returncode == 0
