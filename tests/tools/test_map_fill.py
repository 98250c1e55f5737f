# SPDX-License-Identifier: Apache-2.0
"""How full maps are: the entries in use, the size, and the fullest map first."""

from ipaddress import ip_address

from ebpflb.entries.services import BackendName, Choice, Frontend, Range, ServiceEntry
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import Sweep
from ebpflb.tools.snapshot import map_fill


def test_entries_in_use_are_counted(maps: dict[str, Map]) -> None:
    """In hashes all keys are counted, in arrays the elements that Services use; the number of
    flows is from the last sweep.
    """
    assert {fill.entries for fill in map_fill(maps)} == {0}
    maps["backend_names"].write([(id, BackendName("node", f"web-{id}")) for id in (1, 2, 3)])
    maps["choices"].write([(place, Choice(7, 8, 1)) for place in (3, 4, 5, 6)])  # 3: a former one
    block, table = Range(2, 3), Range(4, 1)
    entry = ServiceEntry(1, frozenset(), 0, block.size, block, block, table)
    frontends = [Frontend(ip_address(f"10.96.0.{last}"), 80, 6) for last in (1, 2)]
    maps["services"].write([(frontend, entry) for frontend in frontends])
    flows = maps["tcp_flows"].spec.entries // 2
    maps["sweeps"].write([(0, Sweep(0, flows, 0))])
    found = {fill.name: fill for fill in map_fill(maps)}
    maps["services"].delete(frontends)
    assert (found["backend_names"].entries, found["choices"].entries) == (3, 2)
    assert (found["services"].entries, found["slots"].entries) == (2, 3)
    assert (found["tcp_flows"].entries, found["other_flows"].entries) == (flows, 0)
    assert found["tcp_flows"].share == 0.5
    assert next(iter(found)) == "tcp_flows"
    assert all(fill.limit == maps[fill.name].spec.entries for fill in found.values())
