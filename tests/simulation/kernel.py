# SPDX-License-Identifier: Apache-2.0
"""The kernel of a simulated agent: bpf(2) with maps, programs, links and pins.

``SimKernel`` has the functions of ``ebpflb.kernel.bpf`` under their names. Each change goes through
``change``, one element at a time, so that anything can happen between any two: look-ups by
programs, an error, the agent's death. Descriptors are real ones, so that leaks are found.
"""

import errno
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from ebpflb.errors import KernelError
from ebpflb.kernel.attach.tcx import TCX_HOOKS as TCX
from ebpflb.kernel.bpf import MAP_KINDS
from ebpflb.kernel.maps.bpf_map import SMALL
from tests.simulation.build import Library

_LOAD64 = 0x18
Change = Callable[[str, Callable[[], Any], bool], Any]
"""Called with a description, what to do, and whether it may fail; does it, and returns its result.
"""


class Object:
    """The object behind a descriptor or a pin."""

    def __init__(self, number: int) -> None:
        self.id = number


class SimTypes(Object):
    """Types for BTF; no id refers to them."""

    def __init__(self, types: bytes) -> None:
        super().__init__(0)
        self.types = types


class SimMap(Object):
    """A map; ``place`` is the C side's pointer to the map."""

    def __init__(self, number: int, library: Library, name: str, sizes: tuple[int, ...]) -> None:
        super().__init__(number)
        self.ffi, self.lib, self.name = library.ffi, library.lib, name
        self.kind, self.key_size, self.value_size, self.entries, self.flags = sizes
        made = self.lib.map_new(self.kind, self.key_size, self.value_size, self.entries)
        self.place = self.ffi.gc(made, self.lib.map_free)

    def lookup(self, key: bytes) -> bytes | None:
        found = self.lib.map_lookup(self.place, key)
        return bytes(self.ffi.buffer(found, self.value_size)) if found else None

    def update(self, key: bytes, value: bytes, flags: int = 0) -> int:
        return int(self.lib.map_update(self.place, key, value, flags))

    def items(self) -> list[tuple[bytes, bytes]]:
        """Yield the entries of a hash."""
        keys, values, count = self.dump()
        return [
            (
                keys[at * self.key_size : (at + 1) * self.key_size],
                values[at * self.value_size : (at + 1) * self.value_size],
            )
            for at in range(count)
        ]

    def dump(self) -> tuple[bytes, bytes, int]:
        """Return keys and values, joined, and their number; for an array all elements."""
        if self.kind == MAP_KINDS["ARRAY"]:
            keys = [at.to_bytes(4, "little") for at in range(self.entries)]
            return b"".join(keys), b"".join(self.lookup(key) or b"" for key in keys), self.entries
        if not self.place.used:
            return b"", b"", 0
        found = bytearray(self.place.used * self.key_size)
        values = bytearray(self.place.used * self.value_size)
        to = self.ffi.from_buffer("char[]", found), self.ffi.from_buffer("char[]", values)
        count = int(self.lib.map_dump(self.place, *to))
        return bytes(found), bytes(values), count


class SimProgram(Object):
    """A loaded program, which keeps its maps, even without their pins."""

    def __init__(self, number: int, name: str, maps: dict[str, SimMap]) -> None:
        super().__init__(number)
        self.name, self.maps = name, maps


class SimLink(Object):
    """A link; ``target`` is a cgroup's inode or a device's ifindex, and 0 once it is detached."""

    def __init__(self, number: int, program: SimProgram, target: int, attach: int) -> None:
        super().__init__(number)
        self.program, self.target, self.attach = program, target, attach


class SimMemory:
    """An array's elements, each written in a separate change."""

    def __init__(self, kernel: "SimKernel", opened: SimMap, size: int) -> None:
        self._kernel, self._name = kernel, opened.name
        self._bytes = opened.ffi.buffer(opened.lib.map_at(opened.place, 0), size)
        self.is_small = size <= SMALL

    def __getitem__(self, at: slice) -> bytes:
        return bytes(self._bytes[at.start : at.stop])

    def __setitem__(self, at: slice, value: bytes) -> None:
        def write() -> None:
            self._bytes[at.start : at.stop] = value

        self._kernel.change(f"memory of {self._name}", write, False)

    def close(self) -> None:
        pass


class SimKernel:
    """Everything that outlives an agent, except descriptors; ``devices`` are existing ifindexes."""

    def __init__(self, library: Library, change: Change) -> None:
        self.library, self.change = library, change
        self.objects: dict[int, Object] = {}  # descriptor -> object
        self.pins: dict[str, Object] = {}
        self.links: list[SimLink] = []
        self.devices = {1}
        self._number = 0
        self._null = os.open(os.devnull, os.O_RDONLY)
        self._inode = os.fstat(self._null)

    def close(self) -> None:
        self.close_descriptors()
        os.close(self._null)

    # Objects and descriptors

    def open(self, found: Object) -> int:
        fd = os.dup(self._null)
        self.objects[fd] = found
        return fd

    def opened(self) -> dict[int, Object]:
        """Return the descriptors that are currently open."""
        self.objects = {fd: found for fd, found in self.objects.items() if self._is_open(fd)}
        return self.objects

    def close_descriptors(self) -> None:
        """Close all descriptors, as when a process ends."""
        for fd in self.opened():
            os.close(fd)
        self.objects.clear()

    def link_at(self, target: int, attach: int) -> SimLink | None:
        """Return the link whose program runs there. A link without pin and descriptor is gone."""
        at_hook = (each for each in self.links if (each.target, each.attach) == (target, attach))
        return next(filter(self._is_kept, at_hook), None)

    def _is_kept(self, link: SimLink) -> bool:
        """Whether a pin or an open descriptor keeps the object."""
        if link in self.pins.values():
            return True
        fds = [fd for fd, found in self.objects.items() if found is link]
        return any(map(self._is_open, fds))

    def _is_open(self, fd: int) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(fd), self._inode)
        return False

    def _map(self, fd: int) -> SimMap:
        found = self.objects[fd]
        assert isinstance(found, SimMap)
        return found

    def _link(self, fd: int) -> SimLink:
        found = self.objects[fd]
        assert isinstance(found, SimLink)
        return found

    def _next(self) -> int:
        self._number += 1
        return self._number

    # Maps

    def map_create(
        self,
        *,
        name: str,
        kind: str,
        sizes: tuple[int, int],
        entries: int,
        flags: int,
        types: tuple[int, int, int],
    ) -> int:
        made = SimMap(self._next(), self.library, name, (MAP_KINDS[kind], *sizes, entries, flags))
        return int(self.change(f"creating {name}", lambda: self.open(made), True))

    def btf_load(self, types: bytes) -> int:
        return self.open(SimTypes(types))

    def array_memory(self, map_fd: int, size: int, *, writable: bool) -> SimMemory:
        return SimMemory(self, self._map(map_fd), size)

    def map_lookup(self, map_fd: int, key: bytes, value_size: int) -> bytes | None:
        found = self._map(map_fd).lookup(key)
        return found and found + bytes(value_size - len(found))

    def map_update(
        self, map_fd: int, key: bytes, value: bytes, *, new: bool = False, known: bool = False
    ) -> None:
        opened, flags = self._map(map_fd), 2 * known + new
        short = value[: opened.value_size]
        done = self.change(f"update {opened.name}", lambda: opened.update(key, short, flags), True)
        if done:
            raise KernelError("map update", -done, os.strerror(-done))

    def map_delete(self, map_fd: int, key: bytes) -> bool:
        opened = self._map(map_fd)
        existed = opened.lookup(key) is not None
        self.change(f"delete {opened.name}", lambda: opened.lib.map_delete(opened.place, key), True)
        return existed

    def map_next_key(self, map_fd: int, key: bytes | None, key_size: int) -> bytes | None:
        keys = [each for each, _ in self._map(map_fd).items()]
        following = keys[keys.index(key) + 1 :] if key in keys else keys
        return following[0] if following else None

    def map_lookup_batch(
        self, map_fd: int, cursor: bytes | None, keys: bytearray, values: bytearray, count: int
    ) -> tuple[int, bytes | None]:
        opened = self._map(map_fd)
        if opened.kind == MAP_KINDS["LPM_TRIE"]:
            raise KernelError("map batch look-up", errno.EINVAL, "not supported")
        found_keys, found_values, found = opened.dump()
        keys[: len(found_keys)], values[: len(found_values)] = found_keys, found_values
        return found, None

    def map_write_batch(self, map_fd: int, keys: bytes, values: bytes, count: int) -> None:
        opened = self._map(map_fd)
        for at in range(count):
            key = keys[at * opened.key_size : (at + 1) * opened.key_size]
            value = values[at * opened.value_size : (at + 1) * opened.value_size]
            self.map_update(map_fd, key, value)

    # Programs, links and pins

    def prog_load(self, *, name: str, code: bytes, **_: Any) -> int:
        maps = {opened.name: opened for opened in map(self._map, references(code))}
        made = SimProgram(self._next(), name, maps)
        return int(self.change(f"loading {name}", lambda: self.open(made), True))

    def pin(self, fd: int, path: str) -> None:
        self.change(f"pinning {path}", lambda: self.pins.update({path: self.objects[fd]}), True)

    def get(self, path: str) -> int | None:
        return self.open(self.pins[path]) if path in self.pins else None

    def info(self, fd: int, what: str) -> Any:
        found = self.objects[fd]
        if isinstance(found, SimMap):
            return found
        if isinstance(found, SimProgram):
            return SimpleNamespace(id=found.id, name=found.name, jited_size=0)
        link = self._link(fd)
        return SimpleNamespace(id=link.id, program=link.program.id, cgroup=link.target)

    def link_create(self, prog_fd: int, target: int, attach: int, flags: int = 0) -> int:
        at_device = attach in TCX.values()
        where = target if at_device else os.fstat(target).st_ino
        if at_device and target not in self.devices:
            raise KernelError("attaching", errno.ENODEV, "no such device")
        program = self.objects[prog_fd]
        assert isinstance(program, SimProgram)
        made = SimLink(self._next(), program, where, attach)

        def attached() -> int:
            self.links.append(made)
            return self.open(made)

        return int(self.change(f"attaching {program.name}", attached, True))

    def link_update(self, link_fd: int, prog_fd: int) -> None:
        link, program = self._link(link_fd), self.objects[prog_fd]
        assert isinstance(program, SimProgram)
        if not link.target:
            raise KernelError("replacing a program", errno.ENOLINK, "detached")
        self.change("replacing a program", lambda: setattr(link, "program", program), True)

    def link_detach(self, link_fd: int) -> None:
        self.change("detaching", lambda: setattr(self._link(link_fd), "target", 0), True)

    def query_links(self, ifindex: int, attach: int) -> dict[int, int]:
        if ifindex not in self.devices:
            raise KernelError("asking", errno.ENODEV, "no such device")
        found = self.link_at(ifindex, attach)
        return {found.id: found.program.id} if found else {}


CALLS = (
    "map_create", "map_lookup", "map_update", "map_delete", "map_next_key", "map_lookup_batch",
    "map_write_batch", "prog_load", "pin", "get", "info", "link_create", "link_update",
    "link_detach", "query_links", "btf_load",
)  # fmt: skip


def references(code: bytes) -> list[int]:
    """Return the descriptors of maps in a program."""
    found, at = [], 0
    while at < len(code):
        opcode, registers, _, number = struct.unpack_from("<BBhi", code, at)
        if opcode == _LOAD64 and registers >> 4 == 1:
            found.append(number)
        at += 16 if opcode == _LOAD64 else 8
    return found
