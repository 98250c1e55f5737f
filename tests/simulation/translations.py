# SPDX-License-Identifier: Apache-2.0
"""Netfilter's table in a simulated kernel: the endpoint for each chosen backend.

The table outlives agents. The agent's own NetfilterSync writes it, one element after the other.
After each change in the kernel the table is compared with the backends that programs can choose at
that moment. In the simulation the programs themselves use the flow tables, so no packet waits for a
translation.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ebpflb.agent import engine
from ebpflb.agent.engine import NetfilterSync
from ebpflb.entries.services import Backend, ServiceEntry, Translation
from ebpflb.errors import KernelError, NodeError
from ebpflb.kernel.maps import records
from ebpflb.kernel.maps.readers import Translations
from ebpflb.kernel.netfilter import table
from ebpflb.kernel.netfilter.elements import BACKEND_SETS, Change, pack, unpack
from ebpflb.model.addresses import Address
from ebpflb.plan.allocators import QUARANTINE_SECONDS
from tests.simulation.expected import Wrong
from tests.simulation.kernel import SimMap

if TYPE_CHECKING:
    from tests.simulation.agent import Life
    from tests.simulation.node import SimNode

# What a change has to be about, so that programs may choose other backends after it.
_DECIDING = ("update services", "delete services", "memory of slots", "element")
_service = lru_cache(4096)(records.codec("struct service").unpack)
_backend = lru_cache(4096)(records.codec("struct backend").unpack)


class SimTable:
    """``elements`` has the endpoint of each backend id; None: there is no table."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node
        self.elements: dict[int, bytes] | None = None
        self._chosen: dict[int, float] = {}  # id -> when programs could choose it last

    def patches(self) -> list[tuple[object, str, Any]]:
        """Return patches for the calls by which NetfilterSync reaches the kernel."""
        return [
            (engine, "NetfilterTable", lambda options: _Table(self)),
            (engine, "Elements", lambda session, options: _Elements(self)),
            (engine, "read_backends", self.read),
            (table, "remove", lambda: None),
        ]

    @property
    def translations(self) -> dict[int, Translation]:
        elements = self.elements or {}
        return {id: Translation(id, *unpack(endpoint)) for id, endpoint in elements.items()}

    def surplus(self, life: "Life") -> bool:
        """Whether there are elements that the audit removes, because their ids lead nowhere."""
        used = life.service_sync.planner.backend_ids
        left = [id for id in self.translations if id not in used]
        return bool(left) and not Translations(life.datapath.maps).keys() >= set(left)

    def build(self) -> bool:
        existed = self.elements is not None
        self._change("building the table", lambda: None)
        self.elements = self.elements or {}
        return existed

    def new_agent(self) -> None:
        """Note a new agent: programs that chose before are no longer running."""
        self._chosen.clear()

    def read(self) -> dict[int, bytes]:
        return dict(self._there)

    def put(self, id: int, endpoint: bytes) -> None:
        if self._there.get(id, endpoint) != endpoint:
            self._check_unused(id)
        self._change("element", lambda: self._there.update({id: endpoint}))

    def remove(self, id: int) -> None:
        self._check_unused(id)
        self._change("element", lambda: self._there.pop(id, None))

    def check(self, what: str, maps: Mapping[str, SimMap]) -> None:
        """Raise Wrong if programs can choose a backend to which netfilter does not translate."""
        if self.elements is None or not what.startswith(_DECIDING):
            return
        for backend in _choosable(maps):
            self._chosen[backend.id] = self._node.now
            if self.elements.get(backend.id) != pack(backend.address, backend.port):
                raise Wrong(f"after {what} netfilter does not translate to {backend}")

    def _check_unused(self, id: int) -> None:
        last = self._chosen.get(id, 0.0)
        if self._node.now - last < QUARANTINE_SECONDS:
            raise Wrong(f"netfilter loses backend {id}, which a program may have chosen at {last}")

    @property
    def _there(self) -> dict[int, bytes]:
        if self.elements is None:
            raise NodeError("there is no table")
        return self.elements

    def _change(self, what: str, do: Any) -> None:
        try:
            self._node.kernel.change(what, do, True)
        except KernelError as error:
            raise NodeError(str(error)) from error


def _choosable(maps: Mapping[str, SimMap]) -> Iterator[Backend]:
    """Return the backends in the blocks of all frontends."""
    blocks = {}
    for _, value in maps["services"].items():
        service: ServiceEntry = _service(value)
        blocks[service.block] = service.id
    for (base, size), service_id in blocks.items():
        for slot in range(base, base + size):
            held = maps["slots"].lookup(slot.to_bytes(4, "little"))
            backend: Backend | None = _backend(held) if held else None
            if backend and backend.service == service_id:
                yield backend


class _Table:
    """A NetfilterTable in the simulation; its creator owns it."""

    is_owned = True

    def __init__(self, table: SimTable) -> None:
        self._table, self.session = table, None

    def differences(self) -> list[str]:
        return [] if self._table.elements is not None else ["the table is missing"]

    def set_options(self, options: object) -> None:
        pass

    def build(self) -> bool:
        return self._table.build()

    def close(self) -> None:
        pass


class _Elements:
    """Elements in the simulation: an id that is removed and added at once is replaced."""

    def __init__(self, table: SimTable) -> None:
        self._table = table

    def read(self) -> dict[int, bytes]:
        return self._table.read()

    def write(
        self,
        new: Iterable[tuple[int, Address, int]],
        removed: Iterable[tuple[int, Address, int]] = (),
    ) -> None:
        written = set()
        for id, address, port in new:
            self._table.put(id, pack(address, port))
            written.add(id)
        for id, _, _ in removed:
            if id not in written:
                self._table.remove(id)

    def compare(self, wanted: Mapping[int, tuple[Address, int]]) -> Iterator[list[Change]]:
        there, all_wanted = self._table.translations, dict(wanted)
        for id in sorted(there.keys() | all_wanted.keys()):
            old = pack(*there[id][1:]) if id in there else None
            new = pack(*all_wanted[id]) if id in all_wanted else None
            if old != new:
                endpoint = new or old or b""
                version = 4 if len(endpoint) == 8 else 6
                yield [Change(BACKEND_SETS[version], id.to_bytes(4, "little"), old, new)]

    def repair(self, changes: Iterable[Change]) -> None:
        for change in changes:
            id = change.backend_id
            assert id is not None
            if change.new is None:
                self._table.remove(id)
            else:
                self._table.put(id, change.new)


class Translated(NetfilterSync):
    """A change that programs do not notice."""

    flags = frozenset[str]()

    def _may_have_flows(self) -> bool:
        """Return True: the flow tables serve the simulation's packets."""
        return True
