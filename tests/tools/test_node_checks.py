# SPDX-License-Identifier: Apache-2.0
"""The fill of maps in doctor: an element that two frontends share counts once."""

from ipaddress import ip_address

import pytest

from ebpflb.entries.services import Frontend, Range, ServiceEntry
from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.tools.node_checks import CheckResult, settings_results
from tests.kernel.variants import needs_root

pytestmark = needs_root


def found(maps: dict[str, Map]) -> dict[str, CheckResult]:
    return {each.feature: each for each in settings_results(maps)}


@pytest.mark.parametrize("name", ["slots", "choices"])
def test_what_is_nearly_full_is_said(maps: dict[str, Map], name: str) -> None:
    """In slots and tables, only the elements that Services currently use are counted."""
    capacity = {"slots": CAPACITY.slots, "choices": CAPACITY.choices}[name]
    block = Range(0, 95 * CAPACITY.slots // 100 if name == "slots" else 2)
    table = Range(0, 95 * capacity // 200 if name == "choices" else 0)
    entry = ServiceEntry(1, frozenset(), 0, block.size, block, block)._replace(table=table)
    frontends = [Frontend(ip_address(f"10.96.0.{last}"), 80, 6) for last in (1, 2)]
    maps["services"].write([(frontend, entry) for frontend in frontends])
    try:
        said = found(maps)
    finally:
        maps["services"].delete(frontends)
    assert not said[f"map {name}"].ok and "nearly full" in said[f"map {name}"].remedy
    others = {"slots", "choices", "services", "tcp_flows", "other_flows"} - {name}
    assert all(said[f"map {other}"].ok for other in others)
