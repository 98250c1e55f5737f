# SPDX-License-Identifier: Apache-2.0
"""Write addresses of the pools into the status of Services, on the node that owns the pools.

Two nodes may take themselves for the owner for a while. So all Services are read from the API
before anything is written (from etcd, not from a cache), the decision follows from them alone
(plan/pool_addresses.py), and a write fails if the Service has changed since. What two writers did
nevertheless at the same moment is put right by the next one: the older Service keeps the address.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Raw

from ebpflb.agent.loop import Inbox
from ebpflb.agent.pool_addresses import AddressesWritten, AddressOwner, View
from ebpflb.cluster import decoding
from ebpflb.cluster.decoding import RequestRejected
from ebpflb.cluster.event_recorder import EventRecorder, MakeServer, RateLimit, service
from ebpflb.errors import EbpflbError, InvalidObject, in_words
from ebpflb.model.addresses import Address
from ebpflb.model.events import Key, Kind
from ebpflb.model.objects import Service
from ebpflb.model.pools import Claim, Labels, Pools, read_claim
from ebpflb.plan.pool_addresses import allocate
from ebpflb.redaction import redact
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between two looks at whether there is anything to do
BURST, BURST_SECONDS = 5, 5.0  # of lists, whatever Services tenants write
AGAIN = 60.0  # seconds until Services without an address are tried again
RETRY = 10.0  # seconds until a write is tried again that the API server has rejected
PAGE_LIMIT = 500
MOST_NAMED = 100  # Services without an address, in the status
NAMESPACES = "/api/v1/namespaces"
MERGE_PATCH = "application/merge-patch+json"


class _Labelled(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str] | None = None


class _Namespace(msgspec.Struct, frozen=True):
    metadata: _Labelled


class AddressWriter(PeriodicWorker):
    """Writes while ``owner.writes``."""

    def __init__(
        self,
        pools: Pools,
        owner: AddressOwner,
        make_server: MakeServer,
        events: EventRecorder,
        inbox: Inbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("address writer", INTERVAL)
        self._pools, self._owner, self._inbox, self._clock = pools, owner, inbox, clock
        self._make_server, self._events = make_server, events
        self._limit = RateLimit(BURST, BURST_SECONDS, clock)
        self._done: object = None  # what the last successful pass was about
        self._again = math.inf
        self._problems: Mapping[str, str] = {}

    def turn(self) -> None:
        """Give addresses if anything has changed, or Services still lack one."""
        view = self._owner.view
        if view is None or not self._owner.writes:
            self._done = None
            self._report({})
            return
        about = view.claims, view.nodes
        if (about == self._done and self._clock() < self._again) or not self._limit.allows(None):
            return
        try:
            problems = self._give(view)
        except (EbpflbError, OSError) as error:
            self._report({"all Services": redact(in_words(error))})
            raise
        self._done = about
        self._report(problems)

    def _give(self, view: View) -> dict[str, str]:
        """Return the Services that lack an address. Raises ClusterError.

        A Service that is changed all the time, so that its writes fail, stops no other.
        """
        claims = {claim.key: claim for claim in self._claims()}
        given, why = allocate(claims.values(), self._pools, view.barred, self._labels())
        problems = {str(key): why[key] for key, its in given.items() if key in why and not its}
        self._again = self._clock() + AGAIN if problems else math.inf
        for key, addresses in given.items():
            if {*addresses} == {*claims[key].held}:
                continue
            if not self._owner.writes:
                break
            try:
                self._write(claims[key], addresses, why.get(key, ""))
            except RequestRejected as error:
                problems[str(key)] = redact(in_words(error))
                self._again = self._clock() + RETRY
        return problems

    def _claims(self) -> Iterator[Claim]:
        for item in self._listed(Kind.SERVICE, decoding.query(Kind.SERVICE, "")):
            try:
                found = decoding.decode(Kind.SERVICE, item)
            except InvalidObject:  # the agent's source has named it
                continue
            if isinstance(found, Service) and (claim := read_claim(found)):
                yield claim

    def _labels(self) -> dict[str, Labels]:
        """Return the labels of the namespaces, if a pool asks for some."""
        if not any(pool.selector for pool in self._pools):
            return {}
        read = [msgspec.json.decode(it, type=_Namespace) for it in self._listed(NAMESPACES, {})]
        return {each.metadata.name: each.metadata.labels or {} for each in read}

    def _listed(self, kind: str, query: Mapping[str, str]) -> list[Raw]:
        """Return all objects as they are in etcd."""
        items: list[Raw] = []
        token = ""
        while True:
            which = {**query, "limit": str(PAGE_LIMIT)} | ({"continue": token} if token else {})
            page = self._make_server().page(kind, which)
            token = decoding.read_list(page, items.append).token
            if not token:
                return items

    def _write(self, claim: Claim, addresses: tuple[Address, ...], why: str) -> None:
        """Write the status of a Service. Raises ClusterError, also if it was changed meanwhile."""
        key, ingress = claim.key, [{"ip": str(each)} for each in addresses]
        place = f"{quote(key.namespace, safe='')}/services/{quote(key.name, safe='')}"
        body: dict[str, Any] = {
            "metadata": {"resourceVersion": claim.version},
            "status": {"loadBalancer": {"ingress": ingress or None}},
        }
        path = f"{NAMESPACES}/{place}/status"
        self._make_server().patch(path, MERGE_PATCH, msgspec.json.encode(body))
        text = ", ".join(map(str, addresses)) or "none"
        note = f"address {text}" + (f" instead of {_shown(claim.held)}: {why}" if why else "")
        log.info("Service %s: %s", key, note)
        self._events.event(service(key), "Normal", "AddressAssigned", "AssignAddress", note)

    def _report(self, problems: Mapping[str, str]) -> None:
        """Tell the loop, and make an Event of each new problem."""
        for name, why in problems.items():
            if self._problems.get(name) != why and "/" in name:
                about = service(Key(*name.split("/")))
                self._events.event(about, "Warning", "NoAddress", "AssignAddress", why)
        if problems != self._problems:
            self._problems = dict(problems)
            named = dict(list(problems.items())[:MOST_NAMED])
            self._inbox.put(AddressesWritten(named))


def _shown(addresses: tuple[Address, ...]) -> str:
    return ", ".join(map(str, addresses)) or "none"
