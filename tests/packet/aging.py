# SPDX-License-Identifier: Apache-2.0
"""Make the flows of a node older, so that no test waits for a timeout."""

import time

import pytest

from tests.packet.node import PacketNode

MONOTONIC_COARSE = 6  # the clock by which flows are dated (uapi/linux/time.h)
SECOND = 1_000_000_000


def table_of(protocol: str) -> str:
    return "tcp_flows" if protocol == "tcp" else "other_flows"


def idle(node: PacketNode, protocol: str, seconds: float, lasted: float = 0) -> None:
    """Set when all flows of the protocol's map were last used, and when they began."""
    table = node.maps[table_of(protocol)]
    used = time.clock_gettime_ns(MONOTONIC_COARSE) - int(seconds * SECOND)
    begun = used - int(lasted * SECOND)
    if begun < 0:
        pytest.skip("the machine has not been up for so long")
    table.write([(k, flow._replace(last_seen=used, created=begun)) for k, flow in table.items()])


def forget(node: PacketNode, protocol: str) -> None:
    """Delete all flows of the protocol's map."""
    table = node.maps[table_of(protocol)]
    table.delete([key for key, _ in table.items()])
