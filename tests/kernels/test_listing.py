# SPDX-License-Identifier: Apache-2.0
"""The list of kernels: one line each, and a word for whoever asks for another."""

import subprocess
import sys

import pytest

from vagrant.kernels import listing
from vagrant.kernels.errors import LabError


def lab(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "vagrant.kernels", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_list() -> None:
    """The kernels that the issue of the lab was about are there, and last that of arm64."""
    assert {"5.10", "6.1", "6.12"} <= set(listing.kernels())
    *lines, last = lab("list").stdout.splitlines()
    assert lines == [" ".join(kernel) for kernel in listing.kernels().values()]
    assert last == " ".join(listing.ARM64)


def test_one_more_line() -> None:
    """A further kernel is a further line; comments and blank lines are none."""
    text = "# comment\n\n5.15  suite  http://archive\n"
    assert listing.kernels(text) == {"5.15": listing.Kernel("5.15", "suite", "http://archive")}


def test_half_a_line() -> None:
    with pytest.raises(LabError, match=r"name, suite and archive are wanted: 5\.15 suite"):
        listing.kernels("5.15 suite\n")


@pytest.mark.parametrize("command", ["test", "shell", "fetch"])
def test_unknown(command: str) -> None:
    """An unknown kernel: one line with the names there are."""
    done = lab(command, "2.4")
    assert done.returncode == 1
    assert done.stderr == "kernel lab: unknown kernel '2.4': there are 5.10, 6.1, 6.12, 6.1-arm64\n"
