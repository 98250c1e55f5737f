# SPDX-License-Identifier: Apache-2.0
"""What tests need of the kernel: where it is missing they are skipped, and pytest says why."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.kernel.netfilter import probe
from ebpflb.kernel.netfilter.flowtable import flowtable_obstacle

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


def sctp() -> None:
    """Skips the test where the kernel's NAT does not translate SCTP."""
    netfilter()
    if not probe.can_translate_sctp():
        pytest.skip("this kernel's NAT does not translate SCTP")


def _skip_for(obstacle: Callable[[], str | None]) -> None:
    if missing := obstacle():
        pytest.skip(missing)
