# SPDX-License-Identifier: Apache-2.0
"""Packets that a node forwards as a router: their outcome, and the age of the programs' notes about
them.
"""

from tests.packet.frames import Packet, forwarded
from tests.packet.node import Outcome, PacketNode

SECOND = 1_000_000_000
TRIAL = 3 * SECOND
PASSED = ("pass", {"passed": 1})


def sent_on(node: PacketNode, packet: Packet) -> Outcome:
    """Return the outcome of a packet that leaves by the device where it came in."""
    came = node.ingress(packet)
    assert came.verdicts == {"passed": 1}
    return node.egress(forwarded(came.packet))


def became(outcome: Outcome) -> tuple[str, dict[str, int]]:
    return outcome.action, outcome.verdicts


def grow_older(node: PacketNode, by: int) -> None:
    """Move the notes about all connections back in time, at most to the machine's start."""
    table = node.maps["forwarded"]
    table.write(
        [(key, entry._replace(since=max(0, entry.since - by))) for key, entry in table.items()]
    )
