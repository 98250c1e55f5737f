# SPDX-License-Identifier: Apache-2.0
"""The agent's answers at its local socket: pages of Services, and those of other modules.

A handler in its own thread puts a Call into the inbox. The loop answers it with immutable
values, which takes microseconds; the thread makes the page from them. So a page shows one moment,
and no request, however large, keeps the loop busy for long.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from fnmatch import translate
from functools import partial
from urllib.parse import parse_qs

import msgspec

from ebpflb.agent.loop import Inbox
from ebpflb.agent.sync import Sync
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoints import Topology
from ebpflb.model.events import Key, Kind
from ebpflb.model.pools import answered_by
from ebpflb.model.services import likely_service
from ebpflb.plan.planner import Planner
from ebpflb.serve.listener import JSON, NOT_FOUND, Handler, Request, Response
from ebpflb.serve.service_page import (
    NOT_ALL_LISTS,
    ServiceFacts,
    ServiceList,
    count,
    count_rows,
    make_service_page,
    port_facts,
    summary,
)

MOST_SERVICES = 500  # in one answer
AT_ONCE = 100  # services in one call of the loop
NOTHING_SERVED = (
    "nothing to serve: no cluster IP (headless or ExternalName), or labelled for another proxy"
)

Pages = Mapping[str, Handler]


def local_pages(pages: Pages) -> Handler:
    """Return the handler of the local socket; ``pages``: beginning of a path -> its handler."""

    def respond(request: Request) -> Response:
        page = next((it for begins, it in pages.items() if request.path.startswith(begins)), None)
        try:
            return page(request) if page else NOT_FOUND
        except TimeoutError:
            return error(503, "the agent is busy or starting")
        except ValueError as wrong:
            return error(400, str(wrong))

    return respond


class Inspection:
    """The handler of the local socket's questions about Services."""

    def __init__(self, inbox: Inbox, sync: Sync, maps: Mapping[str, Map]) -> None:
        self._ask, self._sync, self._cluster, self._maps = inbox.ask, sync, sync.cluster, maps

    def respond(self, request: Request) -> Response:
        """Serve /v1/service?namespace=&name=, and /v1/services?match=&after=&limit=.

        Raises TimeoutError, and ValueError for an invalid request.
        """
        pages = {"/v1/service": self._service, "/v1/services": self._services}
        page = pages.get(request.path)
        return page(parse_qs(request.query, keep_blank_values=True)) if page else NOT_FOUND

    def _service(self, query: dict[str, list[str]]) -> Response:
        key = Key(_only(query, "namespace"), _only(query, "name"))
        facts = self._ask(lambda: _facts(key, self._cluster, self._sync.service_sync.planner))
        if facts is None:
            known = self._ask(lambda: list(map(str, self._cluster.services)))
            return error(404, f"no Service {key}: {likely_service(str(key), known)}")
        page = make_service_page(facts)
        count(page, self._maps)
        return answer(page)

    def _services(self, query: dict[str, list[str]]) -> Response:
        """Return Services in the order of their names; ``more``: how many come after the last.

        Raises ValueError for an invalid limit.
        """
        limit = min(int(_only(query, "limit") or MOST_SERVICES), MOST_SERVICES)
        known, complete = self._ask(lambda: (list(self._cluster.services), self._cluster.complete))
        named = re.compile("|".join(map(translate, query.get("match", ["*"])))).match
        found = sorted((key for key in known if named(str(key))), key=str)
        start = bisect_right(found, _only(query, "after"), key=str)
        keys = found[start : start + limit]
        rows = [summary(make_service_page(facts)) for facts in self._each(keys)]
        count_rows(rows, self._maps)
        more, notes = len(found) - start - len(keys), [] if complete else [NOT_ALL_LISTS]
        return answer(ServiceList(rows, more, notes))

    def _each(self, keys: list[Key]) -> Iterator[ServiceFacts]:
        for start in range(0, len(keys), AT_ONCE):
            facts = self._ask(partial(self._all_facts, keys[start : start + AT_ONCE]))
            yield from filter(None, facts)

    def _all_facts(self, keys: list[Key]) -> list[ServiceFacts | None]:
        return [_facts(key, self._cluster, self._sync.service_sync.planner) for key in keys]


def _facts(key: Key, cluster: ClusterState, planner: Planner) -> ServiceFacts | None:
    """Return the facts about a Service; None if there is no such Service."""
    invalid = cluster.invalid.get((Kind.SERVICE, key))
    if key not in cluster.services and not invalid:
        return None
    ports = cluster.services.get(key, ())
    return ServiceFacts(
        key,
        tuple([port_facts(port, planner) for port in ports]),
        cluster.slices_for(key),
        Topology(cluster.node_name, cluster.zone),
        (*_notes(key, cluster, invalid),),
        {port.name: cluster.set_aside(port.name) for port in ports},
    )


def _notes(key: Key, cluster: ClusterState, invalid: str | None) -> Iterator[str]:
    if not cluster.complete:
        yield NOT_ALL_LISTS
    if invalid:
        yield f"invalid: {invalid} ({cluster.effect(Kind.SERVICE, key)})"
    elif not cluster.services.get(key):
        yield NOTHING_SERVED
    yield from cluster.warnings_of(key)
    for address in {
        ip: None for port in cluster.services.get(key, ()) for ip in port.load_balancer_ips
    }:
        if node := cluster.address_owners.get(str(address)):
            yield answered_by(str(address), node, cluster.address_nodes)
    for slice in cluster.slices_of.get(key, ()):
        if wrong := cluster.invalid.get((Kind.ENDPOINT_SLICE, slice)):
            effect = cluster.effect(Kind.ENDPOINT_SLICE, slice)
            yield f"EndpointSlice {slice} is invalid: {wrong} ({effect})"


def _only(query: dict[str, list[str]], name: str) -> str:
    return query.get(name, [""])[0]


def answer(value: object) -> Response:
    return Response(200, msgspec.json.encode(value), JSON)


def error(status: int, text: str) -> Response:
    return Response(status, msgspec.json.encode({"error": text}), JSON)
