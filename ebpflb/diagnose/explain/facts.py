# SPDX-License-Identifier: Apache-2.0
"""The rows that steps refer to, each read from its map when it is asked for."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.errors import one_line
from ebpflb.model.addresses import Address
from ebpflb.plan.entries import Backend, BackendName, Choice, Frontend, Range, ServiceEntry
from ebpflb.plan.wording import host_port, service_name


class Share(NamedTuple):
    """A backend of a service, and how likely a new connection gets it, from 0 to 1."""

    slot: int
    endpoint: str
    chance: float
    node: str
    pod: str
    zone: str
    note: str


class MapFacts:
    """The pinned maps as a question needs them.

    ``cgroup`` is where the socket hooks are attached, as paths in /proc have it; ``socket_hooks``:
    whether they are; ``devices``: those that have programs.
    """

    def __init__(
        self, maps: Mapping[str, Map], cgroup: Path, devices: frozenset[int], *, socket_hooks: bool
    ) -> None:
        self.maps, self.cgroup, self.devices = maps, cgroup, devices
        self.socket_hooks = socket_hooks
        self.settings = maps["settings"].get(0)
        self.host_netns: int = self.settings.host_netns

    def service_at(self, frontend: Frontend) -> ServiceEntry | None:
        found: ServiceEntry | None = self.maps["services"].get(frontend)
        return found

    def service_ids(self, frontend: Frontend) -> list[int]:
        """Of the services that it may be: by its address, and as a NodePort."""
        nodeport = frontend._replace(address=type(frontend.address)(0))
        found = (self.service_at(frontend), self.service_at(nodeport))
        return [service.id for service in found if service]

    def service(self, number: int) -> str:
        return one_line(service_name(self.maps["service_names"].get(number), number))

    def name(self, backend: int) -> BackendName:
        found = self.maps["backend_names"].get(backend) or BackendName("", "")
        return BackendName(*map(one_line, found))

    def backend(self, number: int) -> Backend | None:
        slot = self.maps["backend_slots"].get(number)
        return self.slot(slot) if slot is not None else None

    def slot(self, slot: int) -> Backend | None:
        if slot >= self.maps["slots"].spec.entries:
            return None
        found: Backend = self.maps["slots"].get(slot)
        return found

    def endpoint(self, backend: Backend | None) -> str:
        """ADDRESS:PORT, and the pod."""
        if backend is None:
            return "an endpoint that has gone"
        pod = self.name(backend.id).target
        return host_port(backend.address, backend.port) + (f" ({pod})" if pod else "")

    def endpoints_of(self, pod: str) -> Iterator[tuple[Address, str]]:
        """The address and node of the backends whose pod is called so."""
        for number, name in self.maps["backend_names"].items():
            backend = self.backend(number) if name.target == pod else None
            if backend and backend.id == number:
                yield backend.address, name.node

    def shares(self, service: ServiceEntry, chosen: Range, only: int | None) -> Iterator[Share]:
        """The service's block, slot by slot; of ``chosen`` one gets it, unless it is ``only``."""
        chances = self._chances(service, chosen)
        for slot in range(service.cluster.base, service.cluster.base + service.slots):
            backend = self.slot(slot)
            if backend is None or backend.service != service.id:
                continue
            is_candidate = chosen.base <= slot < chosen.base + chosen.size
            chance = float(backend.id == only) if only else chances.get(slot, 0.0)
            name, where = self.name(backend.id), host_port(backend.address, backend.port)
            note = self._note(backend, is_candidate)
            yield Share(slot, where, chance, *name, note)

    def _chances(self, service: ServiceEntry, chosen: Range) -> dict[int, float]:
        """Slot -> its part of all that is drawn, from the slots or from the service's table."""
        if not service.table.size:
            slots = range(chosen.base, chosen.base + chosen.size)
            return dict.fromkeys(slots, 1 / max(1, chosen.size))
        found: defaultdict[int, float] = defaultdict(float)
        first = (
            service.table.base + (chosen == service.local != service.cluster) * service.table.size
        )
        for at in range(first, first + service.table.size):
            place: Choice = self.maps["choices"].get(at)
            part = place.below / 2**32 / service.table.size
            found[place.slot] += part
            found[place.other] += 1 / service.table.size - part
        return found

    def _note(self, backend: Backend, is_candidate: bool) -> str:
        if is_candidate:
            return ""
        return "other node" if "cluster" in backend.flags else "draining"
