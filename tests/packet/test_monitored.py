# SPDX-License-Identifier: Apache-2.0
"""The event of a packet shows the entry that decided, whatever else was looked up."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ebpflb.kernel import monitoring
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.readers import Ring
from ebpflb.kernel.maps.records import Monitor
from ebpflb.kernel.programs import compiler, precompile
from tests.kit import once
from tests.packet.conftest import Loaded, loaded
from tests.packet.frames import at, datagram, opening
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import moves, serve


@pytest.fixture(scope="module")
def datapath(shared: Path, cache: Path) -> Iterator[Loaded]:
    """Load the monitoring variant and its maps."""
    flags = precompile.VARIANTS["hooks/packet.c"]["monitoring"]
    with once.alone(shared):
        compiled = compiler.compile_source("hooks/packet.c", flags, cache=cache)
    with loaded(compiled, **layout.MONITOR_MAPS) as found:
        yield found


def test_datagram_after_frontends_moved(node: PacketNode, places: Places) -> None:
    """A datagram whose frontend's service is looked up again still belongs to a known flow."""
    node.settings("detect_local", frontend_moves=1)
    client, there = at(places.client, 50123), at(places.there, 8080)
    where = serve(node, places, "nodeport", "udp", cluster=[there])
    node.ingress(opening("udp", client, where))
    node.put("monitor", 0, Monitor(monitoring.decision_mask(["established"])))
    moves(node)
    with closing(Ring(node.maps["events"])) as ring:
        assert node.ingress(datagram(client, where)).verdicts == {"established": 1}
        (event,) = ring.take_values()
    (entry,) = (each for each in node.flows("udp").values() if each.kind == event.kind)
    assert monitoring.FLOW_KINDS[event.kind] == "dnat"
    assert (event.address, event.port) == (entry.address, entry.port)
    assert (event.service, event.backend) == (entry.service, entry.backend)
