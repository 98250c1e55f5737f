# SPDX-License-Identifier: Apache-2.0
"""The netns cookie program returns a process's network namespace as newer kernels do."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ebpflb.kernel.attach import cgroup_links

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="bpf(2) is root's")
ASK = """
import sys
from pathlib import Path
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.node import namespaces
cgroup_links.cgroup_root = lambda: Path(sys.argv[2])
print(cgroup_links.cookie_by_program(Path(sys.argv[1])), namespaces.own_cookie())
"""


@pytest.fixture(autouse=True)
def cgroup_root(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach the program to a cgroup that has only this process and its children."""
    monkeypatch.setattr(cgroup_links, "cgroup_root", lambda: inside)


def elsewhere(cache: Path, cgroup_root: Path) -> list[str]:
    """Return the cookie in a new network namespace."""
    command = ["unshare", "--net", sys.executable, "-c", ASK, str(cache), str(cgroup_root)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_program_and_kernel_agree(cache: Path) -> None:
    """The program and the kernel agree, if the kernel has the socket option."""
    assert cgroup_links.cookie_by_program(cache) == cgroup_links.netns_cookie(cache)


def test_namespaces_differ(cache: Path, inside: Path) -> None:
    """Each namespace has its own cookie, and keeps it."""
    told, known = elsewhere(cache, inside)
    assert int(told) not in (0, cgroup_links.cookie_by_program(cache))
    assert known in (told, "None")
    assert cgroup_links.cookie_by_program(cache) == cgroup_links.cookie_by_program(cache)


def test_without_mark(cache: Path) -> None:
    """While the program is attached, other sockets behave as without it."""
    with (
        cgroup_links.cookie_program(cache),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other,
    ):
        other.bind(("127.0.0.1", 0))
        assert other.getsockname()[0] == "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unbound:
            assert unbound.getsockname() == ("0.0.0.0", 0)
