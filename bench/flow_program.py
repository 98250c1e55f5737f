# SPDX-License-Identifier: Apache-2.0
"""What a packet of an established flow costs at a device, and one of no flow, by test runs; with
with the flow tables, and on the engine netfilter.

A program of its own that prints JSON, so that it measures another commit's code as well.
"""

import json
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Any

from ebpflb.entries.flows import STREAM_AFTER, Flow, Tuple
from ebpflb.entries.services import Backend, Frontend, Range, ServiceEntry, Settings
from ebpflb.kernel.map_writer import MapWriter
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.programs import compiler, loader
from ebpflb.options import Paths

BATCHES, REPEAT = 7, 300_000  # test runs of one round
LOOPBACK = 1  # ifindex
FIRST_CLIENT, BACKEND = IPv4Address("10.0.0.1"), IPv4Address("172.16.0.2")
FIRST_PORT, CLIENT_PORTS, BACKEND_PORT = 1000, 50_000, 2000
KINDS = {"ingress": "FLOW_UN_SNAT", "egress": "FLOW_UN_DNAT"}
NO_FLOW = 1 << 23  # the number of a flow that is never in the map
_ACK = 0x10
_PROTOCOLS = {"TCP": socket.IPPROTO_TCP, "UDP": socket.IPPROTO_UDP}


def client(flow: int) -> tuple[IPv4Address, int]:
    """Return the address and port of the flow of this number."""
    return FIRST_CLIENT + flow // CLIENT_PORTS, FIRST_PORT + flow % CLIENT_PORTS


def frame(protocol: int, flow: int) -> bytes:
    """Return an Ethernet frame of the client: a segment that only acknowledges, or data."""
    address, port = client(flow)
    if protocol == socket.IPPROTO_TCP:
        inner = struct.pack("!HHIIBBHHH", port, BACKEND_PORT, 1, 1, 0x50, _ACK, 1000, 0, 0)
    else:
        inner = struct.pack("!HHHH", port, BACKEND_PORT, 28, 0x1234) + bytes(20)
    ends = address.packed + BACKEND.packed
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(inner), 1, 0, 64, protocol, 0)
    return bytes(12) + b"\x08\x00" + header + ends + inner


def entry(protocol: int, hook: str, flow: int) -> tuple[Any, Any]:
    """Return a flow whose packets stay unchanged, so that one can run repeatedly."""
    hooks = layout.ffi.typeof("enum hook").relements
    kinds = layout.ffi.typeof("enum flow_kind").relements
    address, port = client(flow)
    at, port_there, other = (
        (BACKEND, BACKEND_PORT, port) if hook == "ingress" else (address, port, BACKEND_PORT)
    )
    names = Flow._fields
    fields: dict[str, Any] = dict.fromkeys(names, 0) | {
        "flags": frozenset(),
        "kind": kinds[KINDS[hook]],
    }
    fields |= {"address": at, "port": port_there, "other_port": other}
    key = Tuple(address, BACKEND, port, BACKEND_PORT, protocol, hooks[f"HOOK_{hook.upper()}"])
    return key, Flow(**fields)


def load(*flags: str, **entries: int) -> tuple[dict[str, Any], list[loader.Program]]:
    """Load maps of these sizes, and both device programs, compiled with ``flags``."""
    specs = {
        name: spec._replace(entries=entries.get(name, spec.entries))
        for name, spec in layout.MAPS.items()
    }
    maps = {
        name: bpf_map.open_map(spec, state_dir.create_map(spec)) for name, spec in specs.items()
    }
    compiled = compiler.compile_source(
        "hooks/packet.c", ("-DHAVE_COARSE_CLOCK", *flags), cache=Paths.cache
    )
    return maps, loader.load(compiled, maps)


def measured() -> Iterator[tuple[str, int]]:
    """Return names of measurements, and nanoseconds."""
    maps, programs = load()
    files = {program.name: program.fd for program in programs}
    if "no_frontends" in maps:
        MapWriter(maps).no_frontends.repair()
    for hook in KINDS:
        for word, protocol in _PROTOCOLS.items():
            flows = maps["tcp_flows" if word == "TCP" else "other_flows"]
            flows.write([entry(protocol, hook, 0)])
            for state, flow in (("established", 0), ("no flow", NO_FLOW)):
                yield f"{word}, {state}, {hook}", _fastest(files[hook], frame(protocol, flow))


def chosen() -> Iterator[tuple[str, int]]:
    """Measure the same on the engine netfilter, with requests; the flow tables are empty."""
    maps, programs = load()
    files = {program.name: program.fd for program in programs}
    flags = frozenset({"netfilter"})
    settings = Settings(flags=flags, frontend_moves=1, stream_after=STREAM_AFTER)
    maps["settings"].write([(0, settings)])
    maps["flow_gate"].write([(0, (0, 1, 0))])
    slots = Range(0, 1)
    maps["slots"].write([(0, Backend(BACKEND, BACKEND_PORT, frozenset({"cluster"}), 1, 1))])
    service = ServiceEntry(1, frozenset(), 0, 1, slots, slots)
    gate = MapWriter(maps).no_frontends if "no_frontends" in maps else None
    for word, protocol in _PROTOCOLS.items():
        frontend = Frontend(BACKEND, BACKEND_PORT, protocol)
        if gate:
            gate.repair()
        for hook in KINDS:
            yield f"{word}, for no service, {hook}", _fastest(files[hook], frame(protocol, 0))
        if gate:
            gate.before_writing([frontend])
        maps["services"].write([(frontend, service)])
        for hook in KINDS:
            yield f"{word}, by netfilter, {hook}", _fastest(files[hook], frame(protocol, 0))


def _fastest(program: int, packet: bytes) -> int:
    """Return the smallest mean of the batches in nanoseconds; at egress, of a forwarded packet."""
    runs = (
        loader.run_program(
            program, packet, repeat=REPEAT, ifindex=LOOPBACK, ingress_ifindex=LOOPBACK
        )
        for _ in range(BATCHES)
    )
    return min(run.nanoseconds for run in runs)


if __name__ == "__main__":
    print(json.dumps(dict([*measured(), *chosen()])))
