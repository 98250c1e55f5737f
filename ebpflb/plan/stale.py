# SPDX-License-Identifier: Apache-2.0
"""Which connections are stale: they lead to an endpoint to which no new connection would lead.

A connection is known by its frontend and its endpoint, in what the programs remember of sockets and
in conntrack. It is compared with what serves now:

- UDP is stale if its endpoint does not serve the frontend (kube-proxy.md 11.1), also if no other
  endpoint does, or the frontend was removed: the endpoint's address may be a stranger's by now.
- TCP and SCTP without an answer are stale if their endpoint does not serve the frontend, or was
  set aside. A client that repeats its request would otherwise reach whoever gets the address.
- An open TCP connection is stale if its Service has on-removal: reset and has not listed the
  endpoint for the grace (``Resets``).

At a frontend that is in no map only connections to the endpoints that it had are stale
(``Removal``): another program may serve the address by now.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from ebpflb.entries.services import Flags, Frontend
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.desired import IN_LISTS
from ebpflb.plan.service_entries import ServiceEntries

Endpoint = tuple[Address, int]
Endpoints = Mapping[Endpoint, Flags]
CHANGING: Endpoints = {}


class Removal(NamedTuple):
    """What a plan took from a service port: connections by ``frontends`` to ``endpoints``.

    ``has_left``: the service port lost these endpoints, or set them aside; otherwise it lost the
    frontends. Without endpoints it got frontends, or their first endpoints: what conntrack got
    there while nothing translated, or while another proxy served, may be stale. ``ids`` are those
    of the endpoints' backends.
    """

    protocol: Protocol
    frontends: Collection[Frontend]
    endpoints: Collection[Endpoint] = ()
    ids: Collection[int] = ()
    has_left: bool = False


def removals(name: PortName, old: ServiceEntries, new: ServiceEntries) -> Iterator[Removal]:
    """Yield what a service port loses by a change of its entries."""
    left, lost = _left(old, new), old.services.keys() - new.services.keys()
    if left:
        endpoints = set(left.values())
        yield Removal(name.protocol, old.services.keys(), endpoints, left.keys(), has_left=True)
    if lost and old.ids:
        yield Removal(name.protocol, lost, {each.endpoint for each in old.backends}, old.ids)
    if name.protocol == Protocol.UDP and any(_begins(old, it, new) for it in new.services):
        yield Removal(name.protocol, new.services.keys())


def united(removals: Iterable[Removal]) -> list[Removal]:
    """Return one removal for the same frontends, so that failing writes do not add up."""
    found = dict[tuple[object, ...], Removal]()
    for each in removals:
        key = each.protocol, frozenset(each.frontends), each.has_left, bool(each.endpoints)
        it = found.get(key, each)
        endpoints, ids = {*it.endpoints, *each.endpoints}, {*it.ids, *each.ids}
        found[key] = each._replace(endpoints=endpoints, ids=ids)
    return [*found.values()]


def _left(old: ServiceEntries, new: ServiceEntries) -> dict[int, Endpoint]:
    """Return the endpoints that were removed, or set aside, by their backends' ids."""
    now = dict(zip(new.ids, new.backends, strict=True))
    return {
        id: before.endpoint
        for id, before in zip(old.ids, old.backends, strict=True)
        if id not in now or (now[id].is_set_aside and not before.is_set_aside)
    }


def _begins(old: ServiceEntries, frontend: Frontend, new: ServiceEntries) -> bool:
    """Whether the frontend gets endpoints, of all nodes or of this one, after it had none."""
    before, now = old.services.get(frontend), new.services[frontend]
    pairs = ((before.cluster, now.cluster), (before.local, now.local)) if before else ()
    return before is None or any(its.size and not had.size for had, its in pairs)


class Watched(NamedTuple):
    """A service port with on-removal: reset.

    Its open connections are reset when their endpoint has not been listed for ``grace`` seconds;
    ``endpoints`` are those that its slices list. If it was deleted, ``former`` are those that it
    had, and no others count.
    """

    grace: float
    frontends: frozenset[Frontend]
    endpoints: frozenset[Endpoint] = frozenset()
    former: frozenset[Endpoint] | None = None


class Deleted(NamedTuple):
    """The change of a service port that was deleted."""


DELETED = Deleted()
Change = Watched | Deleted | None  # None: open connections are kept

KNOWN_SECONDS = 1.0  # a deleted service port without connections is forgotten afterwards


class Resets:
    """Open connections to endpoints that are not listed, and since when: what on-removal asks for.

    The time of an endpoint begins when a search first finds a connection to it, so a start of the
    agent begins it again. Only endpoints with connections are kept, however many come and go. A
    deleted service port has no endpoints, and keeps its grace. Times are in seconds of a monotonic
    clock.
    """

    def __init__(self) -> None:
        self._watched: dict[PortName, Watched] = {}
        self._deleted: dict[PortName, float] = {}  # when
        self._since: dict[PortName, dict[Endpoint, float]] = {}
        self._found = defaultdict[PortName, dict[Endpoint, float]](dict)  # by the current search
        self.due = math.inf  # when a grace may end next; infinity: none is pending

    def update(self, name: PortName, change: Change, now: float) -> bool:
        """Apply a change; return whether to search for connections."""
        before = self._watched.get(name)
        self._deleted.pop(name, None)
        if isinstance(change, Deleted) and before:
            self._deleted[name] = now
            change = before._replace(endpoints=frozenset(), former=before.endpoints)
        if not isinstance(change, Watched):
            self._watched.pop(name, None)
            return False
        self._watched[name] = change
        if pending := self._since.get(name):
            left = {at: since for at, since in pending.items() if at not in change.endpoints}
            self._since[name] = left
            if before and change.grace < before.grace:
                self.due = min([self.due, *(since + change.grace for since in left.values())])
        return before is None or not before.endpoints <= change.endpoints

    def names(self) -> Mapping[Frontend, list[PortName]]:
        """Return the watched service ports by frontend."""
        found = defaultdict[Frontend, list[PortName]](list)
        for name, watched in self._watched.items():
            for frontend in watched.frontends:
                found[frontend].append(name)
        return found

    def find(self, names: Iterable[PortName], endpoint: Endpoint, now: float) -> PortName | None:
        """Return the service port whose connections to this endpoint are to be reset now, or None.

        Notes that there is such a connection.
        """
        known = [(name, its) for name in names if (its := self._watched.get(name))]
        if not known or any(endpoint in its.endpoints for _, its in known):
            return None
        name, watched = known[0]
        is_ours = watched.former is None or endpoint in watched.former
        pending = self._since.get(name, {})
        if not is_ours and endpoint not in pending:
            return None
        since = self._found[name][endpoint] = pending.get(endpoint, now)
        return name if now >= since + watched.grace else None

    def searched(self, begun: float) -> None:
        """Forget what the search that began then has not found."""
        self._since, self._found = self._found, defaultdict(dict)
        for name, deleted in [*self._deleted.items()]:
            if name not in self._since and begun >= deleted + KNOWN_SECONDS:
                del self._deleted[name], self._watched[name]
        ends = (
            since + watched.grace
            for name, pending in self._since.items()
            if (watched := self._watched.get(name))
            for since in pending.values()
        )
        self.due = min((end for end in ends if end > begun), default=math.inf)


class Ends(IntEnum):
    """Which connections between a frontend and an endpoint end."""

    NONE = 0
    UNANSWERED = 1
    ALL = 2


class Stale:
    """Which connections end, at the time ``now`` of one search.

    ``serving`` returns a frontend's endpoints in the maps with their flags: None for no frontend,
    and CHANGING while they are not known. ``keys`` returns the keys that the frontend of a
    connection has, or had, in the maps: a NodePort's is without an address.
    """

    def __init__(
        self,
        serving: Callable[[Frontend], Endpoints | None],
        keys: Callable[[Frontend], Iterable[Frontend]],
        removals: Iterable[Removal],
        resets: Resets | None = None,
        now: float = 0.0,
    ) -> None:
        self._serving, self._keys, self._now = serving, keys, now
        self._resets, self._names = resets, resets.names() if resets else {}
        self._removed = defaultdict[Frontend, list[Collection[Endpoint]]](list)
        for each in removals:
            for frontend in each.frontends:
                self._removed[frontend].append(each.endpoints)

    def ends(self, frontend: Frontend, endpoint: Endpoint, *, is_socket: bool = False) -> Ends:
        """Return which connections end; ``is_socket``: a hook has translated the socket's call.

        A translated connection to a frontend without endpoints ends, and no other one there.
        """
        serving, removed = self._serving(frontend), self._was_removed(frontend, endpoint)
        if serving is CHANGING:
            return Ends.NONE
        itself = frontend.address, frontend.port
        is_served = serving is not None and endpoint in (serving or {itself})
        leads_nowhere = not is_served and (serving is not None or removed or is_socket)
        if leads_nowhere and frontend.protocol == Protocol.UDP:
            return Ends.ALL
        if not is_served and self.reset_by(frontend, endpoint):
            return Ends.ALL
        flags = (serving or {}).get(endpoint, IN_LISTS)
        is_set_aside = removed and is_served and IN_LISTS.isdisjoint(flags)
        begins_again = leads_nowhere and (removed or not is_socket)
        return Ends.UNANSWERED if begins_again or is_set_aside else Ends.NONE

    @property
    def ports(self) -> set[int]:
        """The ports of the frontends at which anything may be stale by removals and resets."""
        return {frontend.port for frontend in chain(self._removed, self._names)}

    @property
    def udp_endpoints(self) -> set[Endpoint] | None:
        """The endpoints to which flows of UDP may be stale by the removals; None: any."""
        udp = [each for at, each in self._removed.items() if at.protocol == Protocol.UDP]
        removed = [*chain.from_iterable(udp)]
        return set(chain.from_iterable(removed)) if all(removed) else None

    def reset_by(self, frontend: Frontend, endpoint: Endpoint) -> PortName | None:
        """Return the service port that resets open connections between these now, or None."""
        if not self._resets or frontend.protocol != Protocol.TCP:
            return None
        names = chain.from_iterable(self._names.get(key, ()) for key in self._keys(frontend))
        return self._resets.find(names, endpoint, self._now)

    def _was_removed(self, frontend: Frontend, endpoint: Endpoint) -> bool:
        return any(
            endpoint in endpoints
            for key in self._keys(frontend)
            for endpoints in self._removed.get(key, ())
        )
