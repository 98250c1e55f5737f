# SPDX-License-Identifier: Apache-2.0
"""A node like RHEL 10: no x_tables modules, no iptables, no nft, conntrack not loaded.

It runs only in the kernel lab, whose machine is thrown away: make test-kernel-without-iptables.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebpflb.options import Paths
from tests.deploy import rights
from vagrant.kernels import lane

pytestmark = pytest.mark.skipif("LAB_KERNEL" not in os.environ, reason="it removes iptables")

PROGRAMS = ("iptables", "ip6tables", "xtables", "arptables", "ebtables", "nft", "ipset")
FILES = ("x_tables", "xt_", "ip_tables", "ip6_tables", "iptable_", "ip6table_", "nft_compat")
LOADED = (
    *("nf_nat_ftp", "nf_nat_tftp", "nf_conntrack_ftp", "nf_conntrack_tftp", "nf_nat"),
    *("nf_conntrack", "ip_tables", "ip6_tables", "x_tables"),
)


@pytest.fixture(scope="module", autouse=True)
def without_iptables() -> None:
    """Remove programs and modules from this machine's copy, and unload what the lab has loaded."""
    for folder in map(Path, ("/usr/sbin", "/usr/bin")):
        for path in [it for name in PROGRAMS for it in folder.glob(f"{name}*")]:
            path.unlink()
    (tree,) = lane.CACHE.glob(f"*/image-*/lib/modules/{os.uname().release}")
    for path in [it for it in tree.rglob("*.ko*") if it.name.startswith(FILES)]:
        path.unlink()
    for name in LOADED:
        subprocess.run(["rmmod", name], stderr=subprocess.DEVNULL, check=False)
    assert not modules() & set(LOADED)


def modules() -> set[str]:
    return {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}


def test_agent_serves(tmp_path: Path) -> None:
    """The engine netfilter serves, also after restarts; the kernel loads its modules, but none of
    x_tables.
    """
    with rights.cluster(tmp_path, Paths.cache) as made:
        for _ in range(2):
            made.agent.start()
            rights.serves(made)
            assert rights.packet_path(made) == "netfilter"
            made.agent.stop()
    assert "nf_conntrack" in modules()
    assert not any(name.startswith(FILES) for name in modules())


@pytest.mark.parametrize("command", ["check", "doctor", "cleanup"])
def test_commands_need_neither_program(command: str) -> None:
    words = [sys.executable, "-m", "ebpflb", command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    if command == "check":
        assert done.returncode == 0, done.stdout
        assert "NAT by nftables" in done.stdout
