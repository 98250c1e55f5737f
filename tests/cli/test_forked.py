# SPDX-License-Identifier: Apache-2.0
"""Tests start most agents as forks of a process that has imported ``ebpflb`` (tests/kit/forked.py).

What such a process does must be what one does that was started again.
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
    """The same status and output."""
    command = [sys.executable, "-P", "-m", "ebpflb", *words]
    anew = subprocess.run(command, capture_output=True, text=True, check=False)
    it = forked.run(*words)
    assert (it.returncode, it.stdout, it.stderr) == (anew.returncode, anew.stdout, anew.stderr)
