# SPDX-License-Identifier: Apache-2.0
"""Writes the map entries of a node that serves one Service of each kind: for packet.c.

    python -m fuzz.maps FILE

For each entry: the length of the map's name, of the key and of the value as u16, then these.
"""

import struct
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from ebpflb.entries.flows import STREAM_AFTER, Timeouts
from ebpflb.entries.services import DeviceEntry, ServiceRange, Settings
from ebpflb.kernel.maps import layout, records
from tests.packet.node import FIRST_PORT, LAST_PORT, bits, prefix
from tests.packet.places import V4, V6
from tests.packet.services import KINDS, written
from tests.publishing import Publisher

UPLINK, PODS = 1, 2  # ifindexes


class Entries(Publisher):
    """Keeps all entries, packed as for the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[tuple[str, bytes, bytes]] = []

    def put(self, name: str, key: Any, value: Any) -> None:
        spec = layout.MAPS[name]
        packed = records.codec(spec.key).pack(key)
        signed = layout.check_in(spec).signed(packed, records.codec(spec.value).pack(value))
        self.packed.append((name, packed, signed))


def node_entries() -> Entries:
    """Return the entries; the fuzzer chooses the flags of the settings."""
    made = Entries()
    fields = {"pods_v4": prefix(V4.pods), "pods_v6": prefix(V6.pods)}
    fields |= {"span_v4": prefix(V4.service_range), "span_v6": prefix(V6.service_range)}
    ports = {"first_port": FIRST_PORT, "last_port": LAST_PORT, "stream_after": STREAM_AFTER}
    made.put("settings", 0, Settings(0, 0, **ports, **fields))
    for key, timeout in Timeouts().table.items():
        made.put("timeouts", key, timeout)
    for index, v4, v6 in ((UPLINK, V4.node, V6.node), (PODS, V4.bridge, V6.bridge)):
        made.put("devices", index, DeviceEntry(ip_address(v4), ip_address(v6), frozenset()))
    number = 0
    for places in (V4, V6):
        made.owns(places.node)
        made.has(places.node)
        address = ip_network(places.service_range).network_address
        made.put("service_ranges", ServiceRange(bits(places.service_range), address), 1)
        backends = [f"[{places.here}]:8080", f"[{places.there}]:8080"]
        for kind, words in KINDS.items():
            for protocol in ("tcp", "udp", "sctp"):
                number += 1
                where = {written(places, kind, protocol): words}
                made.publish(
                    number, where, cluster=backends, local=backends[:1], affinity=number % 2
                )
    return made


def write(path: Path) -> None:
    with path.open("wb") as out:
        for name, key, value in node_entries().packed:
            out.write(struct.pack("<3H", len(name), len(key), len(value)))
            out.write(name.encode() + key + value)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
