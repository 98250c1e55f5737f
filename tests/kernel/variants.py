# SPDX-License-Identifier: Apache-2.0
"""Helpers of these tests: whether they run as root, and the compiled variants."""

import os
import time
from collections.abc import Callable

import pytest

SOURCE = "hooks/socket.c"
SMALL_SOURCE = "hooks/netns_cookie.c"  # compiles in a fraction of the time
VARIANTS = {"set_retval": ("-DHAVE_SET_RETVAL",), "no_retval": ()}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="bpf(2) is root's")


def open_files() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def eventually(holds: Callable[[], object]) -> bool:
    """Whether the condition becomes true soon: the kernel removes cgroups and links
    asynchronously.
    """
    until = time.monotonic() + 60
    while not (is_so := holds()) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(is_so)
