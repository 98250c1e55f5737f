# SPDX-License-Identifier: Apache-2.0
"""Most agents in tests are forks of a process that has imported ``ebpflb`` (tests/kit/forked.py).

A fork must behave like a process that was started afresh.
"""

import subprocess
import sys

import pytest

from tests.kit import forked

COMMANDS = {
    "a success": ("--version",),
    "a usage error": ("run", "--no-such-option"),
    "an error of ours": ("run", "--config", "/nowhere"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_it_says_the_same(words: tuple[str, ...]) -> None:
    """Status and output are the same as those of a new process."""
    command = [sys.executable, "-P", "-m", "ebpflb", *words]
    anew = subprocess.run(command, capture_output=True, text=True, check=False)
    it = forked.run(*words)
    assert (it.returncode, it.stdout, it.stderr) == (anew.returncode, anew.stdout, anew.stderr)
