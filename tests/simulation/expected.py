# SPDX-License-Identifier: Apache-2.0
"""The allowed results of a request while one of several views is in force: the view that the agent
last served, or the one that it is writing.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from tests.simulation.oracle import UNUSED, Served, Sid, View
from tests.simulation.places import CLUSTER_IPS, Asking, Place, Where, outcome, packed, spelled

PASSED, REFUSED, UNALLOCATED = map(outcome, ("passed", "refused", "unallocated"))
NO_LOCAL, DENIED = outcome("no_local_endpoint"), outcome("source_denied")
_NONE = frozenset[int]()
Found = tuple[Served | None, ...]
"""What a frontend leads to in each view."""


class Wrong(BaseException):
    """A check failed. No handler of the product mistakes this for an error of its own."""


class Expected(NamedTuple):
    """The expected results. ``allowed``: what may be found. ``services``: the services with
    affinity; ``sticky``: the backends that affinity keeps, of one of these. ``kept``: the backends
    that sockets and flows keep for their datagrams. ``may_keep``: all that they may keep; None: no
    service has the frontend, so any.
    """

    allowed: frozenset[int]
    sticky: frozenset[int] = _NONE
    kept: frozenset[int] = _NONE
    services: frozenset[Sid] = frozenset()
    may_keep: frozenset[int] | None = None

    def __str__(self) -> str:
        return " or ".join(sorted(map(spelled, self.allowed)))

    def judge_kept(self, who: str, outcome: int) -> None:
        """Check that datagrams went to the same backend as the last ones."""
        if outcome >= 0 and self.may_keep is not None and outcome not in self.may_keep:
            raise Wrong(f"{who} stays with {spelled(outcome)}, which the service does not have")


NOTHING = Expected(frozenset({PASSED}))


class Views:
    """The views; ``at`` returns what a client may find."""

    def __init__(self, views: list[View]) -> None:
        self.views = views
        used = defaultdict[Sid, set[int]](set)
        for served in (each for view in views for each in view.values() if each.affinity):
            used[served.service].update(map(packed, served.used))
        if used:
            for served in (each for view in views for each in view.values()):
                if served.service in used:
                    used[served.service].update(map(packed, served.used))
        self._used: Mapping[Sid, frozenset[int]] = {k: frozenset(v) for k, v in used.items()}

        self._found: dict[Where, Found] = {}
        for where in {where for view in views for where in view}:
            self._found[where] = tuple(view.get(where) for view in views)

    def found(self, where: Where) -> Found:
        return self._found.get(where, ())

    def at(self, where: Where, client: Asking) -> Expected:
        found = self._found.get(where)
        if found is None:
            return NOTHING
        if not self._used:
            return _expected(client, where[0] in CLUSTER_IPS, found, _NONE)
        # Affinity is to the service: a frontend that it had may lead to what it has now.
        shared = (self._used.get(each.service, _NONE) for each in found if each)
        return _expected(client, where[0] in CLUSTER_IPS, found, _NONE.union(*shared))


@lru_cache(10_000)
def _expected(
    client: Asking, is_cluster_ip: bool, found: Found, shared: frozenset[int]
) -> Expected:
    allowed = {outcome for each in found for outcome in _outcomes(each, client)}
    if is_cluster_ip:
        allowed.update(_between(found))
    allowed |= shared
    served = [each for each in found if each]
    with_affinity = frozenset(each.service for each in served if each.affinity)
    same = len(served) == len(found) and len({each.service for each in served}) == 1
    may_keep = None
    if all(each and each.is_there for each in found):
        may_keep = frozenset(packed(place) for each in served for place in each.serving)
    if not (same and all(map(client.may_use, (each.admits for each in served)))):
        return Expected(frozenset(allowed), services=with_affinity, may_keep=may_keep)
    sticky = _in_all(each.backends(client) for each in served)
    if len({each.uses_local(client) for each in served}) > 1:
        # Slots and frontends cannot change at once: as beside a kube-proxy that syncs the slices
        # first, and the policy in its next sync.
        both = combinations(served, 2)
        sticky &= _in_all(later.by_policy_of(former, client) for former, later in both)
    return Expected(
        frozenset(allowed),
        sticky if all(each.affinity for each in served) else _NONE,
        _in_all(each.serving for each in served),
        with_affinity,
        may_keep,
    )


def _between(found: Found) -> Iterable[int]:
    """Return the state between writes: a cluster IP is known before its frontends are written and
    until after they are removed, so requests are refused. The ranges are written before both.
    """
    known = [each is not None and each is not UNUSED for each in found]
    if not any(known) or all(known):
        return []
    return [REFUSED] if all(found) else [REFUSED, UNALLOCATED]


def _outcomes(served: Served | None, client: Asking) -> Iterable[int]:
    if served is None:
        return [PASSED]
    if served is UNUSED:
        return [UNALLOCATED]
    if not client.may_use(served.admits):
        # A pod's socket: its packets are decided on when they leave the pod.
        return [DENIED] if client.name else [PASSED]
    if backends := served.backends(client):
        return map(packed, backends)
    return [NO_LOCAL] if served.has_any else [REFUSED]


def _in_all(parts: Iterable[frozenset[Place]]) -> frozenset[int]:
    """Return the backends that are in all of them."""
    found = list(parts)
    return frozenset(map(packed, frozenset.intersection(*found))) if found else _NONE
