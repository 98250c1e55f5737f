# SPDX-License-Identifier: Apache-2.0
"""Load the recording variant of the programs with private maps, and ask it."""

import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from ebpflb.entries.flows import Ends
from ebpflb.entries.services import Frontend
from ebpflb.kernel import bpf, datapath
from ebpflb.kernel.handing import HopEntry
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map, possible_cpus
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.programs import compiler, loader, precompile
from ebpflb.kernel.segment import ip_header
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol

# Packets for questions: the first of a connection, and its reply.
#
# Checksums of TCP, UDP and SCTP are arbitrary, because programs update them by the difference.

_LINK, _MAC, _SUM = 14, 6, 0x1234
_SYN = 0x02
_INIT = 1  # SCTP's chunk
_MACS = bytes.fromhex("ffffffffffff020000000002")  # broadcast: a packet for this host, too


def request_frame(ends: Ends, protocol: Protocol) -> bytes:
    """Return the frame that begins a connection or flow."""
    return _framed(ends, protocol, _transport(ends, protocol))


def ends_of(frame: bytes) -> Ends:
    """Return the ends of a frame made here, or of one that a program has rewritten."""
    is_v6 = frame[_LINK] >> 4 == 6
    size, at = (16, _LINK + 8) if is_v6 else (4, _LINK + 12)
    source, destination = frame[at : at + size], frame[at + size : at + 2 * size]
    ports = struct.unpack_from("!HH", frame, at + 2 * size)
    return Ends(ip_address(source), ip_address(destination), *ports)


def _transport(ends: Ends, protocol: Protocol) -> bytes:
    ports = ends.source_port, ends.destination_port
    if protocol is Protocol.TCP:
        return struct.pack("!HHIIBBHHH", *ports, 1000, 0, 5 << 4, _SYN, 65535, _SUM, 0)
    if protocol is Protocol.UDP:
        return struct.pack("!HHHH", *ports, 16, _SUM) + bytes(8)
    init = struct.pack("!BBHIIHHI", _INIT, 0, 20, 7, 65535, 1, 1, 9)
    return struct.pack("!HHII", *ports, 0, _SUM) + init


def _framed(ends: Ends, protocol: Protocol, transport: bytes) -> bytes:
    header = ip_header(ends.source, ends.destination, protocol, len(transport))
    return _MACS + header + transport


# The maps for a question: pinned ones, by their descriptors, if programs only read them, and
# private copies if they write them.
#
# From large tables only the rows that concern the question are copied. Reading a row by bpf(2) does
# not count as a use for an LRU.

# Maps that only the agent writes, and the counts of least-connections, which recording programs
# only read. The former are not RDONLY_PROG, because five are written through memory.
SHARED = {
    *("slots", "backend_slots", "choices", "backend_loads", "service_places"),
    *("service_names", "backend_names", "sweeps"),
    *(name for name, spec in layout.PROGRAM_MAPS.items() if "RDONLY_PROG" in spec.flags),
}
MOST_ROWS = 16_384  # maximum copied rows of one table
_LRU_ENTRIES = 16_384  # entries: a smaller LRU evicts while another CPU has free ones
_PART = 65_536  # entries read at once

Matches = Callable[[bytes, bytes], bool]


class PrivateMaps:
    """A node's maps, and private ones instead of those that programs write.

    ``pinned`` are the node's maps, with or without the maps of hand-over; the caller opens them for
    reading and closes them. ``maps`` are the maps that programs are loaded with.
    """

    def __init__(self, pinned: Mapping[str, Map]) -> None:
        """Create the private maps. Raises KernelError."""
        self.pinned = pinned
        with ExitStack() as opened:
            known = [*layout.MAPS, *(it for it in layout.HANDED if it in pinned)]
            specs = [layout.PROGRAM_MAPS[name] for name in (*known, layout.STEPS.name)]
            made = {spec.name: _create(spec) for spec in specs if spec.name not in SHARED}
            for private in made.values():
                opened.callback(private.close)
            shared = {name: pinned[name] for name in known if name in SHARED}
            self.maps: Mapping[str, Map] = {**shared, **made}
            self._opened = opened.pop_all()

    def __enter__(self) -> "PrivateMaps":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def empty(self) -> None:
        """Delete copied rows, and rows that programs have written since."""
        for private in self.maps.values():
            if private.spec.is_filled_by_programs:
                for key, _ in list(private.packed_items()):
                    bpf.map_delete(private.fd, key)

    def copy_key(self, name: str, key: bytes) -> None:
        """Copy one row of a table, if it exists."""
        value = bpf.map_lookup(self.pinned[name].fd, key, layout.MAPS[name].value_size)
        if value is not None:
            bpf.map_update(self.maps[name].fd, key, value)

    def copy_rows(self, name: str, parts: Iterable[bytes], matches: Matches) -> bool:
        """Copy the matching rows of a table whose key or value contains one of ``parts``.

        Returns False if there are more than MOST_ROWS: then some are missing.
        """
        wanted = [row for row in self._rows_with(name, tuple(parts)) if matches(*row)]
        for key, value in wanted[:MOST_ROWS]:
            bpf.map_update(self.maps[name].fd, key, value)
        return len(wanted) <= MOST_ROWS

    def _rows_with(self, name: str, parts: tuple[bytes, ...]) -> Iterator[tuple[bytes, bytes]]:
        """Yield candidate rows.

        A search in all bytes of many rows is fast, and most tables contain none of the parts.
        """
        found = self.pinned[name]
        for keys, values in found.slices(_PART):
            if any(part in keys or part in values for part in parts):
                yield from bpf_map.pairs(found.spec, keys, values)


def _create(usual: MapSpec) -> Map:
    """Create an empty map; a small one: programs skip missing elements of arrays."""
    entries = _LRU_ENTRIES if usual.is_filled_by_programs else 64
    spec = usual.at_most(entries)
    return bpf_map.open_map(spec, state_dir.create_map(spec))


# The map ``steps`` (bpf/record/steps.h): a question for sockets, and the steps of the answer.

_SIZE = layout.STEPS.value_size
_STRIDE = bpf_map.stride(layout.STEPS)
_KEY = bytes(4)
_KINDS = layout.names("step_kind", "STEP_")
MASQUERADES = layout.names("masquerade_reason", "MASQUERADE_")
STEP_SOURCES = layout.names("step_source", "STEP_")


# No socket has this cookie. Its place is beyond the private array, so its entry is in the hash,
# which is emptied between two questions (bpf/sockets/place.h).
NO_SOCKET = 2**64 - 1


class SocketQuestion(NamedTuple):
    """A socket's request: ``type`` as in socket(2); the cookies of the socket and its namespace."""

    frontend: Frontend
    type: int
    netns: int
    initial_netns: int = 0
    socket: int = NO_SOCKET


class Step(NamedTuple):
    """One step; ``kind`` is its name in C in lower case, and defines the meaning of the others."""

    kind: str
    value: int
    address: Address


def begin_steps(fd: int, question: SocketQuestion | None = None) -> None:
    """Clear the map on all CPUs, and write the question."""
    steps = layout.ffi.new("struct steps *")
    if question is not None:
        steps.socket, steps.netns = question.socket, question.netns
        steps.initial_netns, steps.type = question.initial_netns, question.type
        packed = layout.address_bytes(question.frontend.address)
        layout.ffi.memmove(layout.ffi.addressof(steps.frontend, "address"), packed, len(packed))
        steps.frontend.port.wire = socket.htons(question.frontend.port)
        steps.frontend.protocol = question.frontend.protocol
    one = bytes(layout.ffi.buffer(steps)).ljust(_STRIDE, b"\0")
    bpf.map_update(fd, _KEY, one * possible_cpus())


def read_steps(fd: int) -> list[Step]:
    """Return the steps of the last run, on any CPU."""
    cpus = possible_cpus()
    packed = bpf.map_lookup(fd, _KEY, _STRIDE * cpus) or b""
    for cpu in range(cpus):
        cell = layout.ffi.from_buffer(
            "struct steps *", packed[cpu * _STRIDE : cpu * _STRIDE + _SIZE]
        )
        if cell.count:
            return [_step(cell.step[index]) for index in range(cell.count)]
    return []


def port_of(value: int) -> int:
    """Return the port in a step's low 16 bits, which are in network order."""
    return socket.ntohs(value & 0xFFFF)


def _step(found: Any) -> Step:
    words = layout.ffi.addressof(found, "address")
    address = layout.address_from(bytes(layout.ffi.buffer(words)))
    return Step(_KINDS[found.what], int(found.value), address)


_EMPTY = bytes(64)  # the programs for sockets read no packet
ACTIONS = {loader.PASS: "pass", loader.DROP: "drop", loader.REDIRECT: "redirect"}


class Answer(StrEnum):
    """What a hook does with a call, as enum answer in bpf/sockets/reject.h."""

    DENY = "deny"
    LEAVE = "leave"
    REWRITE = "rewrite"


class Handled(NamedTuple):
    """What a program did with a packet; ``action`` is pass, drop or redirect."""

    action: str
    frame: bytes
    mark: int
    steps: list[Step]


class RecordingPrograms:
    """The recording programs for sockets and for packets, each loaded when it is first used.

    They must be used in the node's network namespace, since the kernel uses its routes and devices.
    Both uses raise CompileError, VerifierError, KernelError or NodeError.
    """

    def __init__(self, maps: PrivateMaps, cache: Path) -> None:
        self._steps = maps.maps["steps"].fd
        self.maps = maps
        self._cache = cache
        self._fds: dict[str, int] = {}  # by name, of the programs that are loaded

    def __enter__(self) -> "RecordingPrograms":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def call(self, question: SocketQuestion) -> tuple[Answer, list[Step]]:
        """Return the result and the steps of connect()."""
        begin_steps(self._steps, question)
        program = self._program("explain_connect", precompile.EXPLAIN, datapath.socket_flags)
        ran = loader.run_program(program, _EMPTY)
        return list(Answer)[ran.retval], read_steps(self._steps)

    def handle(self, hook: str, frame: bytes, *, ifindex: int, came_by: int = 0) -> Handled:
        """Return the result for a packet at "ingress" or "egress" of a device.

        ``came_by``: the ingress device of a packet that is leaving; 0: the node itself sends it.
        Raises KernelError: ENODEV if there is no such device, EINVAL if the kernel (before 5.15)
        does not support ``came_by``.
        """
        begin_steps(self._steps)
        program = self._program(
            hook, datapath.PACKET_SOURCE, lambda: (*datapath.packet_flags(), precompile.RECORDING)
        )
        ran = loader.run_program(program, frame, ifindex=ifindex, ingress_ifindex=came_by)
        return Handled(ACTIONS[ran.retval], ran.packet, ran.mark, read_steps(self._steps))

    def hand_over(self, frame: bytes, ifindex: int) -> tuple[str, HopEntry] | None:
        """Return the node, by its MAC address, to which a packet that comes in at the device is
        handed; None: it goes on.
        """
        hops = {mac: HopEntry(*it) for mac, it in self.maps.pinned["hops"].items()}
        own = next((it.own_mac for it in hops.values() if it.ifindex == ifindex), None)
        if own is None:
            return None
        program = self._program("hand_over", precompile.HAND_OVER, datapath.packet_flags)
        ours = bytes.fromhex(own.replace(":", "")) + frame[_MAC:]
        ran = loader.run_program(program, ours, ifindex=ifindex)
        mac = ran.packet[:_MAC].hex(":")
        return (mac, hops[mac]) if ACTIONS[ran.retval] == "redirect" else None

    def _program(self, name: str, source: str, flags: Callable[[], tuple[str, ...]]) -> int:
        """Return the program's descriptor. The verifier takes up to 0.1 s for each program."""
        if name not in self._fds:
            compiled = compiler.compile_source(source, flags(), cache=self._cache)
            self._fds[name] = loader.load_program(name, compiled, self.maps.maps).fd
        return self._fds[name]
