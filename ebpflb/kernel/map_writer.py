# SPDX-License-Identifier: Apache-2.0
"""The agent's operations on its maps.

read_contents     returns the content of the maps, for the planner
apply             writes a plan to the maps, in its order: so EndpointSlices become slots
write_map         makes a small map equal to a mapping
write_settings    writes the map of settings
restore_secret    writes again the secret of the packets' random choices
"""

import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from struct import pack
from typing import Any, NamedTuple
from typing import Protocol as TypingProtocol

from ebpflb.entries import services
from ebpflb.kernel import bpf, valid_contents
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.bpf_map import Counters, Map, MappedArray
from ebpflb.kernel.maps.layout import MAPS, MapSpec
from ebpflb.kernel.maps.service_places import ServicePlaces
from ebpflb.model.addresses import Network
from ebpflb.model.services import Protocol
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.planner import NOT_IN_MAPS, Plan


class FrontendBits:
    """Frontends, each with a bit; several may have one."""

    def __init__(self, bit_of: Callable[[services.Frontend], int]) -> None:
        self._bit_of = bit_of
        self._known = set[services.Frontend]()
        self._counts = Counter[int]()

    def add(self, frontends: Iterable[services.Frontend]) -> list[int]:
        """Return the bits that no frontend had until now."""
        new = {each for each in frontends if each not in self._known}
        if not new:
            return []
        self._known |= new
        taken = Counter(map(self._bit_of, new))
        self._counts.update(taken)
        return [bit for bit, count in taken.items() if self._counts[bit] == count]

    def remove(self, frontends: Iterable[services.Frontend]) -> list[int]:
        """Return the bits that no frontend has any more."""
        gone = self._known.intersection(frontends)
        self._known -= gone
        freed = Counter(map(self._bit_of, gone))
        self._counts.subtract(freed)
        return [bit for bit in freed if not self._counts[bit]]


# The map no_frontends: its bits tell programs where no frontend is, so that they skip the look-up.
#
# Each frontend has a bit: a hash of its address, port and protocol, or for a NodePort its port. A
# bit is set while no frontend has it. In a new map no bit is set, so programs look everything up. A
# bit is cleared before a frontend is written, and set after the frontend was removed.

WORDS = MAPS["no_frontends"].entries
_PORTS = 1 << 16
PLACES = 64 * WORDS - _PORTS  # FRONTEND_PLACES of bpf/rules/frontend.h
_ALL = (1 << 64) - 1
_MAPPED = 0xFFFF << 32  # of a v4-mapped address


class NoFrontends:
    """The bits of all frontends; ``opened`` is the map.

    Raises KernelError if it cannot be written.
    """

    def __init__(self, opened: MappedArray) -> None:
        self._map = opened
        self.load(())

    def load(self, frontends: Iterable[services.Frontend]) -> None:
        """Set the complete list of frontends in map services. ``repair`` writes the bits."""
        self._its, self._words = FrontendBits(bit_of), [_ALL] * WORDS
        for bit in self._its.add(frontends):
            self._words[bit // 64] &= ~(1 << bit % 64)

    def before_writing(self, frontends: Iterable[services.Frontend]) -> None:
        """Clear the bits of frontends that map services will get."""
        self._flip(self._its.add(frontends))

    def after_removing(self, frontends: Iterable[services.Frontend]) -> None:
        """Set the bits of frontends that map services no longer has."""
        self._flip(self._its.remove(frontends))

    def wrong(self) -> list[int]:
        """Return the numbers of the words that differ from the plan."""
        found, wanted = self._map.memory[: 8 * WORDS], self._packed()
        if found == wanted:
            return []
        return [n for n in range(WORDS) if found[8 * n : 8 * n + 8] != wanted[8 * n : 8 * n + 8]]

    def repair(self) -> None:
        """Write all words at once if one is wrong; in a new map all are wrong."""
        if self._map.memory[: 8 * WORDS] != (wanted := self._packed()):
            self._map.write_run(0, array("I", wanted))

    def _packed(self) -> bytes:
        return pack(f"={WORDS}Q", *self._words)

    def _flip(self, bits: Iterable[int]) -> None:
        changed = set()
        for bit in bits:
            self._words[bit // 64] ^= 1 << bit % 64
            changed.add(bit // 64)
        if changed:
            self._map.write([(at, self._words[at]) for at in changed])


def bit_of(frontend: services.Frontend) -> int:
    """Return the frontend's bit, as frontend_bit of bpf/rules/frontend.h computes it."""
    address, port, protocol = frontend
    number = int(address)
    if not number:
        return PLACES + port
    number |= _MAPPED if address.version == 4 else 0
    mixed = ((number >> 64 ^ (port << 8 | protocol)) * 0x94D049BB133111EB ^ number) & _ALL
    mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15 & _ALL
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _ALL
    return (mixed >> 32) % PLACES


# The operations of an agent on its maps.

_REMOVED = "removed_"
NETFILTER = frozenset({"netfilter", "netfilter_sctp"})
_MOST_MOVES, _WRITES = 2**32 - 1, 2**64  # the largest values of the counters


def capacity(specs: Mapping[str, MapSpec]) -> Capacity:
    """Return the capacity of maps of these sizes.

    Endpoints take a third of the slots at most: wherever a Service's slots lie, there is room for
    as many new ones on one side of them.
    """
    return Capacity(
        services=specs["services"].entries,
        slots=specs["slots"].entries,
        service_ids=specs["service_stats"].entries,
        backend_ids=min(specs["backend_slots"].entries, services.Chosen.ID + 1),
        source_ranges=specs["source_ranges"].entries,
        choices=specs["choices"].entries,
        endpoints=min(specs["backend_slots"].entries, specs["slots"].entries // 3),
    )


def capacity_of(maps: Mapping[str, Map]) -> Capacity:
    return capacity({name: opened.spec for name, opened in maps.items()})


CAPACITY = capacity(layout.MAPS)  # of maps with the usual sizes


class Difference(NamedTuple):
    """Pairs to write, and keys to delete."""

    new: list[tuple[Any, Any]]
    removed: list[Any]


class Translations(TypingProtocol):
    """The writer of a plan's translations (agent.engine)."""

    def write(self, plan: Plan) -> None: ...

    def read_former(self) -> list[services.Translation]: ...

    def hold_ports(self) -> None: ...


class MapWriter:
    """The open maps; ``host_netns`` is the cookie of the node's network namespace, 0 if unknown."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self.maps = maps
        self.capacity = capacity_of(maps)
        self.host_netns = 0
        self.netfilter: Translations | None = None
        no_frontends = maps["no_frontends"]
        assert isinstance(no_frontends, MappedArray)
        self.no_frontends = NoFrontends(no_frontends)
        self.places = ServicePlaces(maps)
        self._flags: services.Flags = services.NO_FLAGS  # added to the flags that a caller writes
        self._asked = services.Settings()  # the settings that a caller wrote last
        self._last_settings: services.Settings | None = None  # the settings last read or written
        self._packed = bytearray(maps["settings"].spec.value_size)  # the same, as the map has them
        self._numbers = layout.ffi.from_buffer("struct settings *", self._packed)
        self._written: dict[str, Mapping[Any, Any]] = {}  # what small maps hold, by our writes

    def read_contents(self) -> MapContents:
        """Return the content of the maps, which an earlier agent may have written.

        Entries that no agent can have written are removed.
        """
        valid = valid_contents.ValidContents(self.maps, self.capacity, repair=True)
        contents = valid.read_back()
        settings = self._settings()
        contents.last_ids = services.LastIds(settings.last_service, settings.last_backend)
        self.no_frontends.load(contents.frontends())
        self.no_frontends.repair()
        self.places.load()
        return contents

    def service_ranges(self) -> list[Network]:
        """Return the ranges in the map, which an earlier agent may have written."""
        found = (services.network_of(key) for key, _ in self.maps["service_ranges"].items())
        return [network for network in found if network is not None]

    def apply(self, plan: Plan) -> None:
        """Write the plan. Raises KernelError after some of the writes, which is a safe state."""
        last_ids = plan.last_ids[0]._asdict() if plan.last_ids else {}
        with self._writing(frontends_move=self._moves_frontends(plan), **last_ids):
            if self.netfilter:
                self.netfilter.write(plan)
            reused = self._reused_ids(plan)
            self._counters("backend_stats").zero(reused)
            self._begin_generation(reused)
            self.no_frontends.before_writing(frontend for frontend, _ in plan.services)
            for part, rows in plan.parts():
                if part in NOT_IN_MAPS:
                    continue
                if part == "removed_backend_slots":
                    self.maps["backend_slots"].write([(id, services.NO_SLOT) for id in rows])
                elif part == "tables":
                    self._write_tables(rows)
                elif part.startswith(_REMOVED):
                    if part == "removed_services":
                        self.places.remove(rows)
                    self.maps[part.removeprefix(_REMOVED)].delete(rows)
                else:
                    self.maps[part].write(rows)
                    if part == "services":
                        self.places.write(rows)
            if plan.removed_services:
                self.no_frontends.after_removing(plan.removed_services)
            self._counters("service_stats").zero(plan.removed_service_names)
            self._begin_generation(plan.removed_backend_slots)

    def _write_tables(self, tables: Iterable[services.Table]) -> None:
        choices = self.maps["choices"]
        assert isinstance(choices, MappedArray)
        for table in tables:
            choices.write_run(table.first, table.places)

    def _moves_frontends(self, plan: Plan) -> bool:
        """Whether UDP frontends get a service, change theirs, or lose it."""
        if any(frontend.protocol == Protocol.UDP for frontend in plan.removed_services):
            return True
        former = self.maps["services"].get
        udp = ((f, new.id) for f, new in plan.services if f.protocol == Protocol.UDP)
        return any(not (old := former(f)) or old.id != id for f, id in udp)

    def _reused_ids(self, plan: Plan) -> list[int]:
        """Return ids of removed backends that new backends get.

        Until then their counters show whether sockets still use them.
        """
        slots = self.maps["backend_slots"]
        return [id for id, _ in plan.backend_names if slots.get(id) == services.NO_SLOT]

    def _begin_generation(self, ids: Iterable[int]) -> None:
        """Begin a generation, so that old connections do not count for new backends with these ids.

        A generation begins when a backend is removed: when its id is used again, after the
        quarantine, no program has read the old generation any more. It begins again when the id is
        reused, because of connections that were counted late.
        """
        loads = self.maps["backend_loads"]
        for id in ids:
            former = loads.get(id)
            generation = (former.generation + 1) % 2**32
            loads.write([(id, former._replace(open=0, generation=generation))])

    def _draw_secret(self) -> None:
        """Draw the secret, only once.

        Packets of one flow must get the same choice, whichever agent or version runs.
        """
        if not self.maps["secret"].get(0):
            self.maps["secret"].write([(0, secrets.randbits(64) | 1)])
        self._secret = self.maps["secret"].get(0)

    def secret_differs(self) -> bool:
        """Whether the secret has changed since the maps were opened."""
        return bool(self.maps["secret"].get(0) != self._secret)

    def restore_secret(self) -> None:
        """Write the secret that was there when the maps were opened."""
        self.maps["secret"].write([(0, self._secret)])

    def map_difference(self, name: str, wanted: Mapping[Any, Any]) -> Difference:
        """Return the writes that make a map equal to ``wanted``."""
        return _difference(dict(self.maps[name].items()), wanted)

    def write_map(self, name: str, wanted: Mapping[Any, Any]) -> None:
        """Make a map equal to ``wanted``; only differences are written.

        The map is read only the first time, and after ``forget_maps``.
        """
        former = self._written.pop(name, None)  # unknown if a write fails
        if former is None:
            former = dict(valid_contents.valid_items(self.maps[name]))
        new, removed = _difference(former, wanted)
        if new or removed:
            with self._writing():
                self.maps[name].write(new)
                self.maps[name].delete(removed)
        self._written[name] = dict(wanted)

    def forget_maps(self) -> None:
        """Note that others may have written the maps of ``write_map``."""
        self._written.clear()

    def settings_difference(self, settings: services.Settings) -> list[str]:
        """Return the fields that ``write_settings`` would change, and "writes" if it is odd."""
        self._last_settings = None
        found, wanted = self._settings(), self._wanted_settings(settings)
        fields = [name for name in found._fields if getattr(found, name) != getattr(wanted, name)]
        return [*fields, *(["writes"] if found.writes % 2 else [])]

    def write_settings(self, settings: services.Settings) -> None:
        """Write the settings, if they differ, except the fields that this writer keeps itself."""
        self._asked = settings
        wanted = self._wanted_settings(settings)
        ended = _ended(wanted, frontends_move=bool(wanted.writes % 2))
        self._write_settings(wanted._replace(**ended))

    def _wanted_settings(self, settings: services.Settings) -> services.Settings:
        """Return what is to be written. Until the flow tables may open flows netfilter goes on."""
        found = self._settings()
        waits = self._flags and not settings.flags & NETFILTER
        kept = found.flags & NETFILTER if waits else services.NO_FLAGS
        return settings._replace(
            host_netns=self.host_netns,
            writes=found.writes,
            flags=settings.flags | self._flags | kept,
            frontend_moves=found.frontend_moves,
            last_service=found.last_service,
            last_backend=found.last_backend,
            service_places=self.maps["service_places"].spec.entries,
        )

    def _counters(self, name: str) -> Counters:
        opened = self.maps[name]
        assert isinstance(opened, Counters)
        return opened

    def _settings(self) -> services.Settings:
        """Return the settings, read once: the agent alone writes them, twice for each plan.

        ``settings_difference`` detects writes of other programs.
        """
        if self._last_settings is None:
            opened = self.maps["settings"]
            self._last_settings = opened.get(0)
            self._packed[:] = opened.packed(0, self._last_settings)[1]
        return self._last_settings

    def _write_settings(self, settings: services.Settings) -> None:
        if settings != self._settings():
            self._packed[:] = self.maps["settings"].packed(0, settings)[1]
            self._write_packed(settings)

    def _write_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Write these fields of the settings, twice for each plan; only they are packed again."""
        settings = self._settings()._replace(**numbers)
        for name, number in numbers.items():
            setattr(self._numbers, name, number)
        self._write_packed(settings)

    def _write_packed(self, settings: services.Settings) -> None:
        self._last_settings, opened = None, self.maps["settings"]  # unknown if the write fails
        bpf.map_update(opened.fd, opened.key.pack(0), bytes(self._packed))
        self._last_settings = settings

    @contextmanager
    def _writing(self, *, frontends_move: bool = False, **fields: Any) -> Iterator[None]:
        """Make the count of writes odd during the writes; ``fields`` are written with it, before.

        A reader that sees an odd or changed count has read a mixture of two states. After an error
        the count stays odd on purpose: the maps hold such a mixture.
        """
        settings = self._settings()
        unfinished = bool(settings.writes % 2)
        self._write_numbers({"writes": settings.writes + (not unfinished), **fields})
        yield
        moved = frontends_move or unfinished
        self._write_numbers(_ended(self._settings(), frontends_move=moved))


def _difference(former: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> Difference:
    new = [(key, value) for key, value in wanted.items() if former.get(key) != value]
    return Difference(new, [key for key in former if key not in wanted])


def _ended(settings: services.Settings, *, frontends_move: bool) -> dict[str, Any]:
    """Return the numbers after a write; an unfinished write may have moved frontends too."""
    moves = settings.frontend_moves
    return {
        "writes": (settings.writes + settings.writes % 2) % _WRITES,
        "frontend_moves": moves % _MOST_MOVES + 1 if frontends_move or not moves else moves,
    }
