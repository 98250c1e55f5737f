# SPDX-License-Identifier: Apache-2.0
"""The map by which the program of hand-overs skips what is sent to other addresses."""

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from struct import unpack
from types import SimpleNamespace
from typing import Any

import pytest

from ebpflb.entries.services import Frontend
from ebpflb.kernel.handing import WORDS, Handing, HopEntry, believed, bit_of
from ebpflb.kernel.maps.layout import HANDED
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.model.addresses import Family
from ebpflb.plan.handing import HandedFrontend, HandedPlace, HandingPlan
from tests.kernel.variants import needs_root

pytestmark = needs_root
V4, V6 = ip_address("203.0.113.10"), ip_address("fd03:113::10")
ALSO_V4 = V4 + 27584  # the next with the same bit
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
    words = enumerate(unpack(f"={WORDS}Q", opened.get(0)))
    found = {at * 64 + bit for at, word in words for bit in range(64) if word << bit & 1 << 63}
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
    left.write([(0, b"\7" + bytes(8 * WORDS - 1))])
    left.close()
    handing.read()
    assert bits(home) == {bit_of(V4)}


def test_a_new_agent_knows_whom_the_former_one_believed(handing: Handing, home: StateDir) -> None:
    """It knows them by family; this node's own MAC address is not one of them."""
    two, three = "02:00:00:00:00:02", "02:00:00:00:00:03"
    families = {two: 3, three: 2, "02:00:00:00:00:01": 0}
    handing.set_hops({mac: HopEntry(V4, 2, two, bits) for mac, bits in families.items()})
    assert believed(home) == {(Family.IPV4, two), (Family.IPV6, two), (Family.IPV6, three)}


def test_what_a_former_agent_has_left_is_read(handing: Handing) -> None:
    """The places of frontends' blocks, and the members of all other blocks."""
    macs = [f"02:00:00:00:00:{number:02}" for number in (1, 2)]
    places = {3 + at: HandedPlace(mac, 7) for at, mac in enumerate(macs)}
    stale, entry = HandedPlace(macs[0], 6), HandedFrontend(7, 3, 2, 0)
    frontends = {Frontend(V4, 80, 6): entry, Frontend(V6, 80, 6): entry}
    members = [*places.values(), stale]
    handing.write(HandingPlan([*places.items(), (9, stale)], members, frontends, {}, []))
    assert handing.read() == (frontends, places, [stale])
