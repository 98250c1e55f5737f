# SPDX-License-Identifier: Apache-2.0
"""The agent's status (status.py) as metrics: what is served, and what is wrong.

Services that are not programmed are named, but no more than MAX_NAMED of them: the reason is a full
map, the same for all, and `ebpflb status` names the others.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from prometheus_client.core import GaugeMetricFamily, Metric

from ebpflb.datapath.maps.layout import layout_hash
from ebpflb.model.events import Kind
from ebpflb.serve.status import CURRENT_PROGRAMS, AgentStatus
from ebpflb.version import BUILD_DATE, COMMIT, VERSION

MAX_SERIES = 50


class StatusCollector:
    """Of the status that was published last."""

    def __init__(self, status: Callable[[], AgentStatus]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        yield _build()
        yield _packet_path(status)
        yield from _state(status)
        yield from _not_programmed(status)
        yield _invalid_objects(status)
        text = "1 for each source of objects that cannot be read now"
        errors = GaugeMetricFamily("ebpflb_source_error", text, labels=["source"])
        for source in status.source_errors:
            errors.add_metric([source], 1)
        yield errors


def _build() -> Metric:
    text = "Always 1: the version, its commit and its date, and the layout of the maps"
    labels = ["version", "commit", "build_date", "layout"]
    metric = GaugeMetricFamily("ebpflb_build_info", text, labels=labels)
    metric.add_metric([VERSION, COMMIT, BUILD_DATE, layout_hash()], 1)
    return metric


def _packet_path(status: AgentStatus) -> Metric:
    """Without a sample until the agent has published its first status."""
    text = "Always 1: the engine that opens flows of packets, and why"
    metric = GaugeMetricFamily("ebpflb_packet_path_info", text, labels=["engine", "reason"])
    if status.packet_path:
        metric.add_metric([status.packet_path.engine, status.packet_path.reason], 1)
    return metric


def _state(status: AgentStatus) -> Iterator[Metric]:
    not_served = len(status.devices_not_served)
    for name, text, value in (
        (
            "lists_complete",
            "Whether Services, EndpointSlices and the Node have been received",
            status.lists_complete,
        ),
        ("node_known", "Whether a Node has this node's name", status.node_unknown is None),
        ("service_ports", "Service ports that are programmed", status.service_ports),
        ("backends", "Backends of all service ports", status.backends),
        ("devices_not_served", "Devices whose packets are not served", not_served),
        (
            "ports_not_open",
            "Ports of the agent on which it cannot listen, mostly because another process does",
            len(status.ports_not_open),
        ),
        (
            "programs_current",
            "Whether this agent's programs serve; 0: those of an earlier one",
            status.programs == CURRENT_PROGRAMS,
        ),
        ("audit_outstanding", "What differs now from what is planned", len(status.drift)),
        (
            "audit_failing",
            "Whether the audit cannot compare, or cannot put back what it found",
            bool(status.audit_errors),
        ),
        ("sync_failing", "Whether the last sync failed", status.sync_error is not None),
        (
            "masquerade_ports_reserved",
            "Whether the ports of --masquerade-ports are reserved on this node",
            status.ports_not_reserved is None,
        ),
    ):
        yield GaugeMetricFamily(f"ebpflb_{name}", text, value)


def _not_programmed(status: AgentStatus) -> Iterator[Metric]:
    text = "Services with a port that does not fit: it keeps what it has and still wants"
    yield GaugeMetricFamily("ebpflb_services_not_programmed", text, len(status.not_programmed))
    text = f"1 for each of them; for {MAX_SERIES} Services at most"
    each = GaugeMetricFamily("ebpflb_service_not_programmed", text, labels=["namespace", "name"])
    for service in islice(sorted(status.not_programmed), MAX_SERIES):
        each.add_metric(service.split("/"), 1)
    yield each


def _invalid_objects(status: AgentStatus) -> Metric:
    kinds = Counter(name.partition(" ")[0] for name in status.invalid_objects)
    text = "Invalid objects: the last good state of those that had one stays"
    metric = GaugeMetricFamily("ebpflb_objects_invalid", text, labels=["kind"])
    for kind in Kind:
        metric.add_metric([kind], kinds[kind])
    return metric
