# SPDX-License-Identifier: Apache-2.0
"""The results of `ebpflb check` on stock kernels, against the known features."""

import os

import pytest

from ebpflb.kernel.maps.state_dir import BPFFS
from ebpflb.options import Paths
from ebpflb.tools.check import check_node
from ebpflb.tools.node_checks import CheckResult, missing_requirements

KERNEL = os.environ.get("LAB_KERNEL", "")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="bpf(2) is root's")

NEVER = BPFFS / f"ebpflb-never-{os.getpid()}"

# What Debian's kernels lack; each has a way round it.
LACKS = {
    "5.10": {"coarse clock", "errno from hooks", "SO_NETNS_COOKIE", "source of a route", "tcx"},
    "6.1": {"tcx"},  # it has the source of a route from a stable update
    "6.12": set(),
}


@pytest.fixture(scope="module")
def results() -> list[CheckResult]:
    return check_node(Paths(NEVER), None)


def test_can_run(results: list[CheckResult]) -> None:
    """No required feature is missing."""
    assert missing_requirements(results) == []


@pytest.mark.skipif(KERNEL not in LACKS, reason="what this kernel lacks is not known beforehand")
def test_exactly_missing_features_are_reported(results: list[CheckResult]) -> None:
    """Exactly the features that this kernel lacks are reported missing."""
    assert {result.feature for result in results if not result.ok} == LACKS[KERNEL]


def test_each_says_what_is_lost(results: list[CheckResult]) -> None:
    """A missing feature names its first kernel version and what does not work; a present feature
    names neither.
    """
    for result in results:
        assert bool(result.remedy) != result.ok, result
        assert result.detail


@pytest.mark.usefixtures("results")
def test_leaves_nothing() -> None:
    """The check leaves nothing behind, and does not create the state directory."""
    assert not NEVER.exists()
