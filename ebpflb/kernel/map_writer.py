# SPDX-License-Identifier: Apache-2.0
"""What an agent does with its maps.

read_contents     what is in the maps, for the planner
apply             writes a plan to the maps, in its order: so EndpointSlices become slots
write_map         makes a small map equal to a mapping
write_settings    writes the map of settings
restore_secret    writes again the secret that draws of packets mix in
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple
from typing import Protocol as TypingProtocol

from ebpflb.kernel import sound_contents
from ebpflb.kernel.maps import layout, map_sizes
from ebpflb.kernel.maps.bpf_map import Counters, Map, MappedArray
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.maps.no_frontends import NoFrontends
from ebpflb.model.addresses import Network
from ebpflb.model.services import Protocol
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.entries import NO_SLOT, Flags, Settings, Table, Translation, network_of
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.planner import TRANSLATIONS, Plan

_REMOVED = "removed_"
NO_FLAGS = frozenset[str]()
_MOST_MOVES, _WRITES = 2**32 - 1, 2**64  # as many as the counts' fields hold


def capacity(specs: Mapping[str, MapSpec]) -> Capacity:
    """How much the maps of these sizes hold."""
    return Capacity(
        services=specs["services"].entries,
        slots=specs["slots"].entries,
        service_ids=specs["service_stats"].entries,
        backend_ids=specs["backend_slots"].entries,
        source_ranges=specs["source_ranges"].entries,
        choices=specs["choices"].entries,
    )


def capacity_of(maps: Mapping[str, Map]) -> Capacity:
    """How much these maps hold; of those of the past some are missing."""
    return capacity(map_sizes.LARGEST | {name: opened.spec for name, opened in maps.items()})


CAPACITY = capacity(layout.MAPS)  # of maps with the usual sizes


class Difference(NamedTuple):
    """Pairs to be written, and keys to be deleted."""

    new: list[tuple[Any, Any]]
    removed: list[Any]


class Translations(TypingProtocol):
    """Where the translations of plans are written (agent.netfilter_sync)."""

    def write(self, plan: Plan) -> None: ...

    def former(self) -> list[Translation]: ...


class NoTranslations:
    """Where nothing needs them."""

    def write(self, plan: Plan) -> None:
        """Nothing is written."""

    def former(self) -> list[Translation]:
        """There are none."""
        return []


class MapWriter:
    """The open maps; ``host_netns``: the cookie of the node's network namespace, 0 if unknown."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self.maps = maps
        self.capacity = capacity_of(maps)
        self.host_netns = 0
        self.netfilter: Translations = NoTranslations()
        no_frontends = maps["no_frontends"]
        assert isinstance(no_frontends, MappedArray)
        self.no_frontends = NoFrontends(no_frontends)
        self._flags: Flags = NO_FLAGS  # added to those that a caller writes
        self._last_settings: Settings | None = None  # that were read or written

    def read_contents(self) -> MapContents:
        """The content of the maps, which an earlier agent may have written. What none can have
        written is removed.
        """
        contents = sound_contents.SoundContents(self.maps, self.capacity, repair=True).read_back()
        self.no_frontends.load(contents.frontends())
        self.no_frontends.repair()
        return contents

    def service_ranges(self) -> list[Network]:
        """Those in the map, which an earlier agent may have written."""
        found = (network_of(key) for key, _ in self.maps["service_ranges"].items())
        return [network for network in found if network is not None]

    def apply(self, plan: Plan) -> None:
        """Writes the plan. Raises KernelError after some of the writes, which is a safe state."""
        with self._writing(frontends_move=self._moves_frontends(plan)):
            self.netfilter.write(plan)
            reused = self._reused_ids(plan)
            self._counters("backend_stats").zero(reused)
            self._begin_generation(reused)
            self.no_frontends.before_writing(frontend for frontend, _ in plan.services)
            for part in fields(plan):
                rows = getattr(plan, part.name)
                if part.name in TRANSLATIONS:
                    continue
                if part.name == "removed_backend_slots":
                    self.maps["backend_slots"].write([(id, NO_SLOT) for id in rows])
                elif part.name == "tables":
                    self._write_tables(rows)
                elif part.name.startswith(_REMOVED):
                    self.maps[part.name.removeprefix(_REMOVED)].delete(rows)
                else:
                    self.maps[part.name].write(rows)
            self.no_frontends.after_removing(plan.removed_services)
            self._counters("service_stats").zero(plan.removed_service_names)
            self._begin_generation(plan.removed_backend_slots)

    def _write_tables(self, tables: Iterable[Table]) -> None:
        choices = self.maps["choices"]
        assert isinstance(choices, MappedArray)
        for table in tables:
            choices.write_run(table.first, table.places)

    def _moves_frontends(self, plan: Plan) -> bool:
        """Whether UDP frontends get another service than they have, or one where they have none."""
        former = self.maps["services"].get
        udp = ((f, new.id) for f, new in plan.services if f.protocol == Protocol.UDP)
        return any(not (old := former(f)) or old.id != id for f, id in udp)

    def _reused_ids(self, plan: Plan) -> list[int]:
        """Ids of removed backends that new backends get. Before that, their counters show whether
        sockets still use them.
        """
        slots = self.maps["backend_slots"]
        return [id for id, _ in plan.backend_names if slots.get(id) == NO_SLOT]

    def _begin_generation(self, ids: Iterable[int]) -> None:
        """Nothing of what these backends still have counts for the next ones with their ids.

        Once when a backend is removed: when its id is used again, after the quarantine, no program
        has read the old generation any more. And once then, for what began to be counted late.
        """
        loads = self.maps["backend_loads"]
        for id in ids:
            former = loads.get(id)
            generation = (former.generation + 1) % 2**32
            loads.write([(id, former._replace(open=0, generation=generation))])

    def _draw_secret(self) -> None:
        """Only once: packets of one flow must agree, whichever agent or version runs."""
        if not self.maps["secret"].get(0):
            self.maps["secret"].write([(0, secrets.randbits(64) | 1)])
        self._secret = self.maps["secret"].get(0)

    def secret_differs(self) -> bool:
        """Whether it is no longer the one that was there when the maps were opened."""
        return bool(self.maps["secret"].get(0) != self._secret)

    def restore_secret(self) -> None:
        """Writes that one."""
        self.maps["secret"].write([(0, self._secret)])

    def map_difference(self, name: str, wanted: Mapping[Any, Any]) -> Difference:
        """What has to be written to make a map equal to ``wanted``."""
        former = dict(self.maps[name].items())
        new = [(key, value) for key, value in wanted.items() if former.get(key) != value]
        return Difference(new, [key for key in former if key not in wanted])

    def write_map(self, name: str, wanted: Mapping[Any, Any]) -> None:
        """Makes a map equal to ``wanted``, and writes only what differs."""
        sound_contents.sound_items(self.maps[name])
        new, removed = self.map_difference(name, wanted)
        if new or removed:
            with self._writing():
                self.maps[name].write(new)
                self.maps[name].delete(removed)

    def settings_difference(self, values: Mapping[str, Any]) -> list[str]:
        """The fields that ``write_settings`` would change, "writes" where it is odd."""
        self._last_settings = None
        found, wanted = self._settings(), self._wanted_settings(values)
        fields = [name for name in found._fields if getattr(found, name) != getattr(wanted, name)]
        return [*fields, *(["writes"] if found.writes % 2 else [])]

    def write_settings(self, values: Mapping[str, Any]) -> None:
        """Writes these fields of the settings and the node's netns cookie, if they differ."""
        settings = self._wanted_settings(values)
        unfinished = bool(settings.writes % 2)
        self._write_settings(_written(settings, frontends_move=unfinished))

    def _wanted_settings(self, values: Mapping[str, Any]) -> Settings:
        settings = self._settings()._replace(host_netns=self.host_netns, **values)
        return settings._replace(flags=settings.flags | self._flags)

    def _counters(self, name: str) -> Counters:
        opened = self.maps[name]
        assert isinstance(opened, Counters)
        return opened

    def _settings(self) -> Settings:
        """Read once: the agent alone writes them, twice for each plan. Whether another program
        has written them too, ``settings_difference`` tells.
        """
        if self._last_settings is None:
            self._last_settings = self.maps["settings"].get(0)
        return self._last_settings

    def _write_settings(self, settings: Settings) -> None:
        if settings != self._settings():
            self._last_settings = None  # unknown, if the write fails
            self.maps["settings"].write([(0, settings)])
            self._last_settings = settings

    @contextmanager
    def _writing(self, *, frontends_move: bool = False) -> Iterator[None]:
        """Makes the count of writes odd meanwhile: a reader that sees it odd or changed has read a
        mixture of two states. After an error it stays odd on purpose: the maps hold such a mixture.
        """
        settings = self._settings()
        begun = settings._replace(writes=settings.writes + 1 - settings.writes % 2)
        self._write_settings(begun)
        yield
        unfinished = begun == settings
        self._write_settings(_written(begun, frontends_move=frontends_move or unfinished))


def _written(settings: Settings, *, frontends_move: bool) -> Settings:
    """The settings after a write. One that was left unfinished may have moved frontends too."""
    moves = settings.frontend_moves
    return settings._replace(
        writes=(settings.writes + settings.writes % 2) % _WRITES,
        frontend_moves=moves % _MOST_MOVES + 1 if frontends_move or not moves else moves,
    )
