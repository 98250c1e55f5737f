# SPDX-License-Identifier: Apache-2.0
"""The kernel that the native hooks believe in: maps and helpers, played by Python.

A look-up gives a pointer into memory that stays where it is until the call ends, as in the kernel.
A replaced or deleted value is overwritten at once: the worst that recycling can do to a reader that
still holds it.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ebpflb.kernel.maps import layout, records
from ebpflb.kernel.maps.bpf_map import CPU_ARRAYS
from ebpflb.kernel.maps.layout import COUNTER_PARTS, MapSpec
from ebpflb.kernel.maps.records import SocketEntry

RECYCLED = 0xA5
ENOENT, E2BIG, EFAULT, EEXIST = 2, 7, 14, 17
ANY, NOEXIST = 0, 1  # flags of an update
NS_PER_JIFFY = 4_000_000  # with CONFIG_HZ=250


class Table:
    """A map: packed keys, and values that stay at their place."""

    def __init__(self, ffi: Any, spec: MapSpec) -> None:
        self.ffi = ffi
        self.spec = spec
        self.key, self.value = records.codec(spec.key), records.codec(spec.value)
        self.check = layout.check_in(spec)
        self.places: dict[bytes, Any] = {}
        self.retired: list[Any] = []
        self.entries = spec.entries

    @property
    def is_array(self) -> bool:
        return self.spec.kind in ("ARRAY", "PERCPU_ARRAY", CPU_ARRAYS)

    @property
    def is_full(self) -> bool:
        return self.spec.kind == "HASH" and len(self.places) >= self.entries

    def lookup(self, key: bytes) -> Any:
        """Return the value's place, or NULL."""
        if self.is_array and key not in self.places:
            parts = COUNTER_PARTS if self.spec.kind == CPU_ARRAYS else 1
            if int.from_bytes(key, "little") >= self.spec.entries * parts:
                return self.ffi.NULL
            self._place(key, bytes(self.spec.value_size))
        return self.places.get(key, self.ffi.NULL)

    def update(self, key: bytes, value: bytes) -> None:
        if self.is_array:
            place = self.lookup(key)
            assert place, f"{self.spec.name} has no element {key.hex()}"
            self.ffi.memmove(place, value, len(value))
            return
        self._retire(key)
        self._place(key, value)

    def delete(self, key: bytes) -> bool:
        assert not self.is_array, f"the kernel refuses to delete from the array {self.spec.name}"
        return self._retire(key)

    def items(self) -> Iterator[tuple[Any, Any]]:
        for key, place in self.places.items():
            yield self.key.unpack(key), self.value.unpack(bytes(self.ffi.buffer(place)))

    def _place(self, key: bytes, value: bytes) -> None:
        self.places[key] = self.ffi.new("char[]", len(value))
        self.ffi.memmove(self.places[key], value, len(value))

    def _retire(self, key: bytes) -> bool:
        place = self.places.pop(key, None)
        if place is None:
            return False
        self.ffi.memmove(place, bytes([RECYCLED]) * len(place), len(place))
        self.retired.append(place)
        return True


class Kernel:
    """Maps, clock, random numbers and the calling process; the newest Kernel serves its module.

    ``meanwhile`` has what happens before the next look-ups in a map, ``afterwards`` what happens
    right after them.
    """

    def __init__(self, module: Any, *, names_errno: bool) -> None:
        self.ffi, self.lib = module.ffi, module.lib
        self.names_errno = names_errno
        self.tables = {name: Table(self.ffi, spec) for name, spec in layout.MAPS.items()}
        self.now = 1_000_000_000_000
        self.dice: Callable[[], int] = partial(random.Random(7).getrandbits, 32)
        self.initial_netns = 1
        self.netns = self.cookie = self.cpu = 0
        self.retval = 0
        self.meanwhile: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self.afterwards: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self.errors: list[BaseException] = []
        self.full: set[str] = set()  # maps in which nothing can be inserted
        self._bind()

    def get(self, name: str, key: Any) -> Any:
        """Return a value, or None."""
        table = self.tables[name]
        place = table.lookup(table.key.pack(key))
        return table.value.unpack(bytes(self.ffi.buffer(place))) if place else None

    def put(self, name: str, key: Any, value: Any) -> None:
        table = self.tables[name]
        packed = table.key.pack(key)
        table.update(packed, table.check.signed(packed, table.value.pack(value)))

    def drop(self, name: str, key: Any) -> None:
        self.tables[name].delete(self.tables[name].key.pack(key))

    def items(self, name: str) -> dict[Any, Any]:
        return dict(self.tables[name].items())

    def sockets(self) -> dict[int, SocketEntry]:
        """Return the entries about sockets, by cookie, wherever they are stored."""
        places = (it for _, it in self.tables["socket_places"].items() if it.socket)
        return {it.socket: it.entry for it in places} | self.items("sockets")

    def forget(self, cookie: int) -> None:
        """Forget a socket, as another CPU does."""
        table = self.tables["socket_places"]
        for key, place in list(table.items()):
            if place.socket == cookie:
                table.update(table.key.pack(key), bytes(table.spec.value_size))
        self.drop("sockets", cookie)

    def take_places(self) -> None:
        """Take all places, so that all sockets are in the hash ``sockets``."""
        table = self.tables["socket_places"]
        table.spec = table.spec._replace(entries=0)

    def remembered(self) -> dict[str, int]:
        """Return how many entries about sockets there are, by kind."""
        others = {name: len(self.items(name)) for name in ("assignments", "peers")}
        return {"sockets": len(self.sockets()), **others}

    def run(self, function: str, *arguments: Any, netns: int, cookie: int = 0) -> int:
        """Call a hook, or a look-up, for a socket. Fail if a helper failed in Python."""
        self.netns, self.cookie, self.retval = netns, cookie, 0
        result: int = getattr(self.lib, function)(*arguments)
        for table in self.tables.values():
            table.retired.clear()
        if self.errors:
            raise self.errors.pop()
        return result

    def _bind(self) -> None:
        """Make the module use this kernel's helpers."""
        for helper in (
            self.bpf_map_lookup_elem,
            self.bpf_map_update_elem,
            self.bpf_map_delete_elem,
            self.bpf_ktime_get_ns,
            self.jiffies64,
            self.bpf_skb_load_bytes,
            self.bpf_get_prandom_u32,
            self.bpf_get_smp_processor_id,
            self.get_netns_cookie,
            self.get_socket_cookie,
            self.set_retval,
            self.bpf_sock_ops_cb_flags_set,
        ):
            self.ffi.def_extern(name=helper.__name__, onerror=self._failed)(helper)

    def _failed(self, _kind: type, error: BaseException, _trace: Any) -> None:
        self.errors.append(error)

    def _table(self, map_: Any) -> Table:
        return self.tables[self.ffi.string(self.ffi.cast("char *", map_)).decode()]

    def _bytes(self, pointer: Any, size: int) -> bytes:
        return bytes(self.ffi.buffer(pointer, size))

    def bpf_map_lookup_elem(self, map_: Any, key: Any) -> Any:
        table = self._table(map_)
        if self.meanwhile[table.spec.name]:
            self.meanwhile[table.spec.name].pop(0)()
        found = table.lookup(self._bytes(key, table.spec.key_size))
        if self.afterwards[table.spec.name]:
            self.afterwards[table.spec.name].pop(0)()
        return found

    def bpf_map_update_elem(self, map_: Any, key: Any, value: Any, flags: int) -> int:
        table = self._writable(map_)
        assert flags in (ANY, NOEXIST)
        name = self._bytes(key, table.spec.key_size)
        if flags == NOEXIST and table.lookup(name):
            return -EEXIST
        if (table.is_full or table.spec.name in self.full) and not table.lookup(name):
            return -E2BIG
        table.update(name, self._bytes(value, table.spec.value_size))
        return 0

    def bpf_map_delete_elem(self, map_: Any, key: Any) -> int:
        table = self._writable(map_)
        return 0 if table.delete(self._bytes(key, table.spec.key_size)) else -ENOENT

    def _writable(self, map_: Any) -> Table:
        table = self._table(map_)
        assert "RDONLY_PROG" not in table.spec.flags, f"{table.spec.name} is the agent's"
        return table

    def bpf_ktime_get_ns(self) -> int:
        return self.now

    def jiffies64(self) -> int:
        return self.now // NS_PER_JIFFY

    def bpf_skb_load_bytes(self, _context: Any, _offset: int, _to: Any, _size: int) -> int:
        """Fail: there are no packets, only their metadata (struct packet)."""
        return -EFAULT

    def bpf_get_prandom_u32(self) -> int:
        return self.dice()

    def bpf_get_smp_processor_id(self) -> int:
        return self.cpu

    def get_netns_cookie(self, context: Any) -> int:
        return self.netns if context else self.initial_netns

    def get_socket_cookie(self, _context: Any) -> int:
        return self.cookie

    def bpf_sock_ops_cb_flags_set(self, context: Any, flags: int) -> int:
        self.ffi.cast("struct bpf_sock_ops *", context).bpf_sock_ops_cb_flags = flags
        return 0

    def set_retval(self, retval: int) -> int:
        self.retval = retval
        return 0
