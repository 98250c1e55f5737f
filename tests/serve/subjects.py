# SPDX-License-Identifier: Apache-2.0
"""An agent without a kernel whose metrics are read; and parsed expositions."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ebpflb.kernel.maps.bpf_map import open_map
from ebpflb.kernel.maps.layout import MAPS, MapSpec
from ebpflb.kernel.maps.records import Sweep
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.model.nodes import STATES
from ebpflb.model.packet_path import Engine, PacketPath
from ebpflb.options import SeriesOf
from ebpflb.plan.planner import Planner
from ebpflb.serve.health import Health
from ebpflb.serve.metrics import Metrics, Samples, Sources
from ebpflb.serve.status import AgentStatus
from tests.plan.builders import CAPACITY, desired
from tests.plan.builders import name as port_name

MOVES_BY_ITSELF = "process_", "python_", "ebpflb_conntrack_"
BUSY = AgentStatus(
    pid=1,
    node="node-1",
    source="s",
    started="2026-11-23T12:00:00+00:00",
    packet_path=PacketPath(Engine.FLOWS, "a test"),
    source_errors={"https://api/v1/services": "gone"},
    invalid_objects={"Service shop/odd": "spec.ports[0].port: 0"},
    not_programmed={"shop/web": "map slots is full"},
    addresses="1 announced by this cluster, 1 owned here",
    address_owners={"192.0.2.200": "node-1"},
    hand_over="to 1 of 1 other nodes",
)


@dataclass
class FakeMap:
    """A map whose elements all equal ``element``; a hash's keys are zeros."""

    spec: MapSpec
    element: Any = (0, 0, 0)
    keys: int = 0
    reads: list[str] = field(default_factory=list)

    def get(self, key: int) -> Any:
        self.reads.append(self.spec.name)
        return self.element

    def get_many(self, keys: Collection[int]) -> dict[int, Any]:
        return {key: self.get(key) for key in keys}

    def slices(self, size: int = 4096) -> Iterator[tuple[bytes, bytes]]:
        self.reads.append(self.spec.name)
        yield bytes(self.spec.key_size * self.keys), bytes(self.spec.value_size * self.keys)

    def count(self) -> int:
        self.reads.append(self.spec.name)
        return self.keys


def fake_maps() -> dict[str, Any]:
    """Return empty maps."""
    made = {name: FakeMap(spec) for name, spec in MAPS.items()}
    real = {name: open_map(MAPS[name], -1) for name in FLOW_MAPS}
    for name, opened in real.items():  # whose codecs a FlowTable wants
        made[name].key, made[name].value = opened.key, opened.value  # type: ignore[attr-defined]
    made["sweeps"].element = Sweep(0, 0, 0)
    made["flow_stats"].element = made["service_stats"].element = (0, 0, 0, 0)
    made["backend_stats"].element = (0, 0)
    return made


def fake_datapath(maps: dict[str, Any] | None = None) -> Any:
    state = StateDir(Path("/sys/fs/bpf/ebpflb-test-nowhere"))
    return SimpleNamespace(maps=maps or fake_maps(), state=state, programs=[])


def counts(aside: int = 0, times: int = 0, dropped: int = 0) -> dict[str, Samples]:
    """Return what parts of the agent count."""
    return {
        "ebpflb_endpoints_set_aside": aside,
        "ebpflb_endpoint_set_aside_total": times,
        "ebpflb_node_local_listeners": dict.fromkeys(STATES, dropped),
        "ebpflb_connections_moved_total": dropped,
        "ebpflb_events_dropped_total": dropped,
        "ebpflb_conntrack_table_restored_total": 0,
    }


def sources(
    maps: dict[str, Any] | None = None,
    planner: Callable[[], Planner] = lambda: Planner(CAPACITY),
    status: Callable[[], AgentStatus] = lambda: BUSY,
) -> Sources:
    return Sources(fake_datapath(maps), planner, status, Health(60), counts)


def everything(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    """Return the metrics of an agent without a kernel, each with at least one series."""
    made, planner = Metrics(), Planner(CAPACITY)
    planner.plan_changes({port_name("web"): desired("web", [1], [1])}, 0.0)
    made.read(sources(planner=lambda: planner)._replace(series=SeriesOf(1)))
    made.request("GET", "https://10.96.0.1:443", 200, 0.01)
    made.gate("AllowServiceExternalIPs", "DEPRECATED", enabled=True)
    made.check("ping", "healthz", ok=True)
    return made


def families(text: bytes) -> dict[str, Metric]:
    """Return families by name; a counter's name has its _total, as every query writes it."""
    found = list(text_string_to_metric_families(text.decode()))
    names = [m.name + ("_total" if m.type == "counter" else "") for m in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def values(made: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of /metrics."""
    found = families(made.exposition().body)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in found.values()
        for sample in metric.samples
    }


def value(made: Metrics, name: str, /, **labels: str) -> float:
    """Return the value of one sample."""
    return values(made)[name, frozenset(labels.items())]


def changes(made: Metrics, before: Any) -> dict[str, dict[str, float]]:
    """Return the difference by sample and labels' values, for changed samples only."""
    found: dict[str, dict[str, float]] = {}
    for (name, labels), now in values(made).items():
        then = before.get((name, labels), 0.0)
        if now != then and not name.startswith(MOVES_BY_ITSELF):
            key = " ".join(text for _, text in sorted(labels))
            found.setdefault(name, {})[key] = now - then
    return found
