# SPDX-License-Identifier: Apache-2.0
"""What tests need of the kernel: where it is missing they are skipped, and pytest says why."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ebpflb.kernel.netfilter import probe
from ebpflb.kernel.netfilter.flowtable import flowtable_obstacle
from ebpflb.kernel.netfilter.table import Keeper
from ebpflb.kernel.node.namespaces import call_in_new

bridge_netfilter = pytest.mark.skipif(
    not Path("/proc/sys/net/bridge").exists(), reason="this kernel is without br_netfilter"
)


def netfilter() -> None:
    """Skips the test where nf_tables cannot translate: the engine netfilter needs that."""
    _skip_for(probe.netfilter_obstacle)


def flowtable() -> None:
    """Skips the test where --fast-forward cannot use a flowtable of the kernel."""
    netfilter()
    _skip_for(flowtable_obstacle)


def owned_tables() -> None:
    """Skips the test where no process can own a table of nftables (before Linux 5.12)."""
    if not call_in_new(_can_own_a_table):
        pytest.skip("this kernel knows no tables of nftables with an owner")


def _can_own_a_table() -> bool:
    with closing(Keeper()) as keeper:
        return keeper.open()


def _skip_for(obstacle: Callable[[], str | None]) -> None:
    if missing := obstacle():
        pytest.skip(missing)
