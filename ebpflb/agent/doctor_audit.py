# SPDX-License-Identifier: Apache-2.0
"""The audit for `ebpflb doctor`: the cluster's objects, then everything that the audit compares.

A fresh list of the agent's own source is compared with the objects that the loop has. An event may
be on its way, so only what differs twice counts, and only if no event has come in between.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ebpflb.agent.audit import Audit
from ebpflb.agent.inspection import Call
from ebpflb.cluster.source import Emit, Source, make_source
from ebpflb.errors import ClusterError
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import (
    MAX_LISTED,
    AuditAnswer,
    AuditReport,
    Changed,
    Event,
    Kind,
    Removed,
    Replaced,
    SourceStatus,
    Together,
)
from ebpflb.model.services import KUBERNETES
from ebpflb.options import REPORT, Options
from ebpflb.stopping import parts

LIST_SECONDS = 30.0
AGAIN_SECONDS = 1.0  # until what differs is compared again
CHECK_SECONDS = 10.0  # for the checks of the audit; in a large cluster they take longer
POLL_SECONDS = 0.1
KEPT_SECONDS = 5.0  # for a doctor that asks again; then its result is of the past
_NAME = "doctor audit"
_NOT_NEEDED = "/servicecidrs"  # older roles do not allow them

_Objects = Mapping[str, object]  # by kind and name
_Answer = TypeVar("_Answer")


class DoctorAudit:
    """``differ``: object -> how the agent's copy differs; written by the loop.

    ``audit`` is set before the loop runs.
    """

    audit: Audit

    def __init__(self, options: Options, put: Callable[[Call[Any]], None]) -> None:
        """``put`` belongs to the inbox."""
        self.differ: Mapping[str, str] = {}
        self._options, self._put = options, put
        self._thread: threading.Thread | None = None
        self._made: tuple[float, AuditReport] | None = None

    def poll(self) -> AuditAnswer:
        """Return the report that is ready; if there is none, one is being made from now on."""
        made, self._made = self._made, None
        if made and time.monotonic() - made[0] < KEPT_SECONDS:
            return AuditAnswer(made[1])
        if not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
            self._thread.start()
        return AuditAnswer()

    def _run(self) -> None:
        def make() -> None:
            with suppress(TimeoutError):  # the loop does not answer: doctor asks again
                self._made = time.monotonic(), self.report()

        parts.attempt(_NAME, make)

    def report(self) -> AuditReport:
        """Compare now. Raises TimeoutError if the loop does not answer."""
        not_listed = self._compare_objects()
        wanted = self._call(lambda cluster: self.audit.begin_now())
        until = time.monotonic() + CHECK_SECONDS
        while self._call(lambda cluster: self.audit.unfinished(wanted)):
            if time.monotonic() >= until:
                break
            time.sleep(POLL_SECONDS)
        return self._call(lambda cluster: self._report(wanted, not_listed))

    def _report(self, wanted: Mapping[str, int], not_listed: str) -> AuditReport:
        audit = self.audit
        return AuditReport(
            drift=audit.drift[:MAX_LISTED],
            errors=audit.errors,
            unfinished=audit.unfinished(wanted),
            objects=dict(self.differ),
            not_listed=not_listed,
            repairs=self._options.audit != REPORT,
        )

    def _compare_objects(self) -> str:
        """Compare the objects; return why they could not be listed, or ""."""
        first = second = self._call(_copy)
        found: dict[str, str] = {}
        for is_again in (False, True):
            if is_again and not found:
                break
            time.sleep(AGAIN_SECONDS if is_again else 0)
            try:
                fresh = _copy(listed(self._options))
            except ClusterError as error:
                return str(error)
            first, second = second, self._call(_copy)
            now = dict(_differences(second, fresh))
            found = {
                name: how
                for name, how in now.items()
                if not is_again or (name in found and first.get(name) is second.get(name))
            }
        self._call(lambda cluster: setattr(self, "differ", dict([*found.items()][:MAX_LISTED])))
        return ""

    def _call(self, do: Callable[[ClusterState], _Answer]) -> _Answer:
        """Return the answer of the loop."""
        call = Call[_Answer](lambda cluster, planner, canary: do(cluster))
        self._put(call)
        return call.result()


def _copy(cluster: ClusterState) -> _Objects:
    """Return the valid objects; slices of the API servers may be held back on purpose."""
    valid = cluster.invalid.keys()
    found: dict[str, object] = {
        f"Service {key}": ports
        for key, ports in cluster.services.items()
        if (Kind.SERVICE, key) not in valid
    }
    for key, stored in cluster.slices.items():
        if stored.service != KUBERNETES and (Kind.ENDPOINT_SLICE, key) not in valid:
            found[f"EndpointSlice {key}"] = stored
    return found | ({f"Node {cluster.node_name}": cluster.node} if cluster.node else {})


def _differences(ours: _Objects, fresh: _Objects) -> Iterator[tuple[str, str]]:
    for name in sorted(ours.keys() | fresh.keys()):
        if name not in ours:
            yield name, "the agent does not know it"
        elif name not in fresh:
            yield name, "was deleted, but the agent still has it"
        elif ours[name] != fresh[name]:
            yield name, "the agent has an outdated copy"


def listed(options: Options) -> ClusterState:
    """Return the state of the cluster by a fresh list.

    Raises ClusterError, with the last reason, if the lists are not complete within LIST_SECONDS,
    and as soon as a list that is needed is forbidden.
    """
    cluster = ClusterState(
        options.node_name, bind_address=options.bind_address, admission=options.admission
    )
    inbox = SimpleQueue[Event | Together]()
    source = _source(options, inbox.put)
    source.start()
    try:
        _receive(inbox, cluster, options.source)
    finally:
        source.stop()
    return cluster


def _source(options: Options, emit: Emit) -> Source:
    name = options.node_name
    if options.manifests:
        return make_source(emit, node_name=name, manifests=options.manifests)
    from ebpflb.cluster.api_servers import ApiServers
    from ebpflb.cluster.list_watch import NEWEST

    return make_source(
        emit,
        node_name=name,
        manifests=None,
        kubeconfig=options.kubeconfig,
        master=options.master,
        servers=ApiServers(options.api_servers),
        first_version=NEWEST,
    )


def _receive(inbox: SimpleQueue[Event | Together], cluster: ClusterState, source: str) -> None:
    until, reason = time.monotonic() + LIST_SECONDS, "no answer"
    while not cluster.complete:
        try:
            event = inbox.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            raise ClusterError(f"{source} cannot be listed: {reason}") from None
        for each in event.events if isinstance(event, Together) else (event,):
            if isinstance(each, Replaced | Changed | Removed):
                cluster.apply(each)
            elif isinstance(each, SourceStatus):
                reason = each.error or reason
                is_needed = not each.source.endswith(_NOT_NEEDED)
                until = -math.inf if each.is_forbidden and is_needed else until
