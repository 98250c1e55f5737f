# SPDX-License-Identifier: Apache-2.0
"""What floods of SYNs with forged sources leave alone."""

from pathlib import Path
from typing import Any

import pytest

from ebpflb.kernel.maps.layout import MAPS
from ebpflb.kernel.maps.records import record
from ebpflb.model.packet_path import Engine
from tests.kit import flood, requests
from tests.kit.parameters import both_engines
from tests.kit.requests import lives
from tests.kit.two_nodes import Frontends, TwoNodes

FLOOD = Path(flood.__file__)
FORGED = "172.16.0.1"  # the first of a million
FRONTENDS = Frontends(10)


@pytest.fixture(scope="module", autouse=True)
def forged_sources_are_nobody(two: TwoNodes) -> None:
    """The router drops what is sent to them, so no reset answers their backends."""
    two.lab.router.ip("route add blackhole 172.16.0.0/12")


def counters(two: TwoNodes) -> Any:
    return record("struct flow_counters").cls(*two.maps["flow_stats"].get(0))


def forge(two: TwoNodes, to: tuple[str, int], count: int) -> None:
    """Opens as many flows as the node does not refuse."""
    before = counters(two).created
    program = two.outside.python(FLOOD, "many", to[0], str(to[1]), FORGED, str(count))
    assert two.lab.keep(program).wait() == 0
    assert two.engine is Engine.NETFILTER or counters(two).created - before > 3 * count // 2


@pytest.mark.extended
def test_idle_connection_outlives_half_open_ones(two: TwoNodes) -> None:
    """Half-open connections with twice the entries of the map, all answered, end no idle one."""
    two.publish(two.service("web", 10, two.there))
    to = FRONTENDS.to("nodeport", two.near)
    with two.connected("outside", to) as client:
        forge(two, to, MAPS["tcp_flows"].entries // 2)
        assert lives(client)
    assert counters(two).displaced > 0


@both_engines
def test_affinity_outlives_forged_clients(two: TwoNodes) -> None:
    """A client keeps its endpoint when more forged ones than the map has entries open flows; with
    netfilter beside as many as fit into the map new_affinity.
    """
    two.publish(two.service("web", 10, two.here, two.there, sessionAffinity="ClientIP"))
    to, client = FRONTENDS.to("nodeport", two.near), two.sockets(two.outside)
    kept = requests.tcp(client, *to).name
    known = dict(two.maps["affinity"].items())
    if two.engine is Engine.NETFILTER:
        forge(two, to, 20_000)
    else:
        assert two.outside.v4 in {str(key.address) for key in known}
        forge(two, to, 70_000)
        assert dict(two.maps["affinity"].items()) == known
    assert {requests.tcp(client, *to).name for _ in range(10)} == {kept}
