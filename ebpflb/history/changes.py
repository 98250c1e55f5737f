# SPDX-License-Identifier: Apache-2.0
"""The changes by each sync, in the cluster's terms."""

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ebpflb.history.past import Past, State, moment
from ebpflb.history.segments import Reset, Sync
from ebpflb.model.addresses import host_port
from ebpflb.options import Paths
from ebpflb.plan.entries import (
    Backend,
    Flags,
    Frontend,
    ServiceEntry,
    frontend_kind,
    service_name,
    service_of,
)
from ebpflb.plan.service_entries import used_lists

_SERVICES = "services"


class ServiceChange(msgspec.Struct):
    """The change of one service port; endpoints as ADDRESS:PORT, frontends with their kind."""

    service: str
    endpoints_added: list[str] = []
    endpoints_removed: list[str] = []
    endpoints_changed: list[str] = []  # with their current lists
    frontends_added: list[str] = []
    frontends_removed: list[str] = []
    frontends_changed: list[str] = []
    connections_reset: list[str] = []  # the number, and the endpoint


class Change(msgspec.Struct):
    """One sync; ``maps`` counts the entries that were written and deleted, by map."""

    time: str
    causes: list[dict[str, str]]
    more_causes: int
    services: list[ServiceChange]
    maps: dict[str, dict[str, int]]


class LatestChanges(NamedTuple):
    """The latest changes, and the number of earlier ones that match too."""

    begins: str
    changes: list[Change]
    earlier: int
    notes: list[str]


class _View(msgspec.Struct):
    """One service port in the maps."""

    name: str
    endpoints: dict[str, Flags]
    frontends: dict[str, tuple[Flags, int]]


def latest_changes(
    paths: Paths, service: tuple[str, str] | None, since: float | None, limit: int
) -> LatestChanges:
    """Return the latest changes, at most ``limit`` (0: all), of a Service or of all.

    ``service``: namespace and name; the name "" means all Services of the namespace. Raises
    NodeError without a history.
    """
    past, since = Past(paths), since or 0.0
    times = past.times
    wanted = [number for number, at in enumerate(times) if at >= since]
    shown = wanted if service else wanted[-limit:]
    found: deque[Change] = deque(maxlen=limit or None)
    matching = 0
    for each in changes(past, since, len(times) - shown[0] if shown else 0):
        if service:
            each.services = [it for it in each.services if _is_of(it, service)]
        if each.services or not service:
            found.append(each)
            matching += 1
    earlier = (matching if service else len(wanted)) - len(found)
    return LatestChanges(moment(past.begins), [*found], earlier, past.notes)


def _is_of(change: ServiceChange, service: tuple[str, str]) -> bool:
    namespace, _, name = service_of(change.service).partition("/")
    return namespace == service[0] and service[1] in ("", name)


def changes(past: Past, since: float = 0.0, latest: int | None = None) -> Iterator[Change]:
    """Yield the changes in the order in which they were written; at least the ``latest`` ones."""
    for state, sync in past.syncs(latest):
        if sync.at < since:
            state.apply(sync.writes)
            continue
        ids = _touched(state, sync)
        before = {id: _view(state, id) for id in ids}
        state.apply(sync.writes)
        found = [_service(before[id], _view(state, id)) for id in sorted(ids)]
        resets = [_reset(each) for each in sync.resets]
        yield _change(sync, [each for each in (*found, *resets) if each])


def _change(sync: Sync, services: list[ServiceChange]) -> Change:
    causes = [msgspec.structs.asdict(each) for each in sync.causes]
    return Change(moment(sync.at), causes, sync.more, services, _counts(sync))


def _reset(done: Reset) -> ServiceChange:
    return ServiceChange(done.service, connections_reset=[f"{done.count} to {done.endpoint}"])


def _counts(sync: Sync) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for write in sync.writes:
        past = counts.setdefault(write.map, Counter())
        size = State().map(write.map).spec.key_size
        past["deleted" if write.values is None else "written"] += len(write.keys) // size
    return {name: dict(count) for name, count in counts.items()}


def _touched(state: State, sync: Sync) -> set[int]:
    """Return the ids of services whose frontends are written, also by a change of a backend."""
    after, found = State(), set[int]()
    for write in sync.writes:
        if write.map == _SERVICES:
            size = after.map(_SERVICES).spec.key_size
            keys = (write.keys[at : at + size] for at in range(0, len(write.keys), size))
            found |= {id for key in keys if (id := state.service_id(key)) is not None}
            after.apply([write])
            found |= {id for id, frontends in after.frontends.items() if frontends}
    return found


def _view(state: State, id: int) -> _View | None:
    """Return the service port; None if the maps have nothing of it."""
    services = state.map(_SERVICES)
    keys = sorted(state.frontends.get(id, ()))
    if not keys:
        return None
    entries: dict[Frontend, ServiceEntry] = {
        services.key.unpack(key): services.value.unpack(services.packed[key]) for key in keys
    }
    names, slots = state.map("service_names"), state.map("slots")
    block = max((each.block for each in entries.values()), key=lambda block: block.size)
    fits = sum(block) <= slots.spec.entries
    found: list[Backend] = slots.get_range(*block) if fits else []
    shown = used_lists(each.flags for each in entries.values()) | {"here"}
    return _View(
        service_name(names.get(id), id),
        {
            host_port(each.address, each.port): each.flags & shown
            for each in found
            if each.service == id
        },
        {_frontend(at, it): (it.flags, it.affinity_seconds) for at, it in entries.items()},
    )


def _frontend(at: Frontend, entry: ServiceEntry) -> str:
    return f"{frontend_kind(at, entry.flags)} {at}"


def _service(before: _View | None, after: _View | None) -> ServiceChange | None:
    """Return the change; None if a client could not notice it."""
    known = after or before
    if known is None:
        return None
    old, new = before or _View("", {}, {}), after or _View("", {}, {})
    change = ServiceChange(
        known.name,
        [name for name in new.endpoints if name not in old.endpoints],
        [name for name in old.endpoints if name not in new.endpoints],
        [
            f"{name} ({_lists(flags)})"
            for name, flags in new.endpoints.items()
            if old.endpoints.get(name, flags) != flags
        ],
        [name for name in new.frontends if name not in old.frontends],
        [name for name in old.frontends if name not in new.frontends],
        [name for name, it in new.frontends.items() if old.frontends.get(name, it) != it],
    )
    parts = msgspec.structs.astuple(change)[1:]
    return change if any(parts) else None


def _lists(flags: Flags) -> str:
    return " ".join(sorted(flags & {"cluster", "local"})) or "draining"
