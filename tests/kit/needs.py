# SPDX-License-Identifier: Apache-2.0
"""The kernel features that tests need; without them tests are skipped, with the reason."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel import probe as sockets_probe
from ebpflb.kernel.netfilter import probe
from ebpflb.kernel.netfilter.flowtable import flowtable_obstacle
from ebpflb.kernel.netfilter.table import Keeper
from ebpflb.kernel.node import kube_proxy
from ebpflb.kernel.node.namespaces import call_in_new

bridge_netfilter = pytest.mark.skipif(
    not Path("/proc/sys/net/bridge").exists(), reason="this kernel is without br_netfilter"
)


def netfilter() -> None:
    """Skip the test if nf_tables cannot translate, as the engine netfilter requires."""
    _skip_for(probe.netfilter_obstacle)


@contextmanager
def devices() -> Iterator[None]:
    """Skip the test if the kernel has no devices of a kind that the block adds."""
    try:
        yield
    except NodeError as error:
        if "Unknown device type" not in str(error):
            raise
        pytest.skip("this kernel has no such devices")


def ipvs() -> None:
    """Skip the test if the kernel has no IPVS, and loads none for a rule that needs it."""
    rule = ["iptables-nft", "-A", "OUTPUT", "-m", "ipvs", "--ipvs"]
    subprocess.run(["unshare", "--net", *rule], capture_output=True, check=False)
    if not kube_proxy.SERVERS.exists():
        pytest.skip("this kernel is without IPVS")


def sock_destroy() -> None:
    """Skip the test if no program can end sockets."""
    if not sockets_probe.sock_destroy():
        pytest.skip("this kernel has no bpf_sock_destroy")


def flowtable() -> None:
    """Skip the test if the kernel has no flowtable for --fast-forward."""
    netfilter()
    _skip_for(flowtable_obstacle)


def owned_tables() -> None:
    """Skip the test if no process can own an nft table (before Linux 5.12)."""
    if not call_in_new(_can_own_a_table):
        pytest.skip("this kernel knows no tables of nftables with an owner")


def _can_own_a_table() -> bool:
    with closing(Keeper()) as keeper:
        return keeper.open()


def _skip_for(obstacle: Callable[[], str | None]) -> None:
    if missing := obstacle():
        pytest.skip(missing)
