# SPDX-License-Identifier: Apache-2.0
"""A service whose address is known as a whole, and the outcome of its unknown ports."""

from tests.packet.frames import at
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS

PASS, REJECT, DROP = "unknown_ports", "unknown_ports unknown_reject", "unknown_ports unknown_drop"


def publish(
    node: PacketNode, places: Places, kind: str, words: str = "", *, served: bool = True
) -> str:
    """Publish a service on TCP port 80 whose address is known as a whole; return the address."""
    address: str = places.cluster_ip if kind == "cluster" else getattr(places, kind)
    flags = f"{KINDS[kind]} {words}"
    both = {f"{at(address, 80)}/tcp": flags, f"{at(address, 0)}/icmp": flags}
    node.publish(1, both, cluster=[at(places.there, 8080)] if served else [])
    return address
