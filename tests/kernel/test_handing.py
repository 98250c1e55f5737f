# SPDX-License-Identifier: Apache-2.0
"""The map by which the program of hand-overs skips what is sent to other addresses."""

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebpflb.entries.services import Frontend
from ebpflb.kernel.handing import Handing, bit_of
from ebpflb.kernel.maps.layout import HANDED
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.plan.handing import HandedFrontend, HandingPlan
from tests.kernel.variants import needs_root

pytestmark = needs_root
V4, V6 = ip_address("203.0.113.10"), ip_address("fd03:113::10")
ALSO_V4 = next(it for n in range(1 << 20) if bit_of(it := V4 + 1 + n) == bit_of(V4))
ENTRY = HandedFrontend(0, 0, 0, 0)


@pytest.fixture
def handing(home: StateDir) -> Iterator[Handing]:
    datapath: Any = SimpleNamespace(state=home)
    made = Handing(datapath, Path())
    made.read()
    yield made
    made.close()


def bits(home: StateDir) -> set[int]:
    (opened,) = home.open_maps({it: HANDED[it] for it in ["handed_addresses"]}).values()
    found = {at * 64 + bit for at, word in opened.items() for bit in range(64) if word >> bit & 1}
    opened.close()
    return found


def test_each_address_that_has_a_frontend_has_its_bit(handing: Handing, home: StateDir) -> None:
    """Until its last frontend goes, also of two addresses with one bit; a new agent, which begins
    with what the map of frontends has, repairs what a former one has left.
    """
    first, second = Frontend(V4, 80, 6), Frontend(V4, 80, 17)
    other, third = Frontend(ALSO_V4, 80, 6), Frontend(V6, 80, 6)
    for new, gone, wanted in (
        ([first, second, third], [], {V4, V6}),
        ([first, other], [second, third], {V4}),
        ([], [first], {ALSO_V4}),
        ([third], [other], {V6}),
        ([first], [third], {V4}),
    ):
        plan = HandingPlan([], [], dict.fromkeys(new, ENTRY), dict.fromkeys(gone), [])
        handing.write(plan)
        assert bits(home) == {bit_of(it) for it in wanted}
    (left,) = home.open_maps({it: HANDED[it] for it in ["handed_addresses"]}).values()
    left.write([(0, 7), (bit_of(V4) // 64, 0)])
    left.close()
    handing.read()
    assert bits(home) == {bit_of(V4)}
