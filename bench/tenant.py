# SPDX-License-Identifier: Apache-2.0
"""What 1.5 MB of each list that a tenant may write costs the agent: etcd takes no larger object.

    .venv/bin/python -m bench.tenant [--bytes N]

The agent's own decoding, cluster state, backlog and planner, in a process for each list, without a
kernel: what would be written is packed and thrown away. ``a change`` comes to an agent that serves
already: its processor time, and that of its longest step. ``another's change`` is one of another
namespace, one after the other meanwhile: the processor time until it is written. ``a start`` has
the objects in its first lists.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from bench.report import Lines, Row
from bench.result import run_bench
from ebpflb.agent.loop import startup
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.cluster import decoding
from ebpflb.kernel.map_writer import CAPACITY
from ebpflb.kernel.maps import layout, records
from ebpflb.lab import manifests
from ebpflb.model.addresses import Family
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Key, Kind, Replaced
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.planner import Plan
from ebpflb.plan.service_entries import NO_ENTRIES

Json = dict[str, Any]
MOST_PORTS = 20_000  # of a slice, as the API server validates; and 1,000 endpoints
NAMESPACE, NAME = "tenant", "t"
OTHER = PortName("other", "another", "p0", Protocol.TCP, Family.IPV4)  # another namespace's


class Case(NamedTuple):
    """A list, and what is written: objects that are made until they have the wanted size."""

    what: str
    objects: Callable[[int], list[Json]]


def fill(size: int, entry: Callable[[int], Any]) -> list[Any]:
    """Return entries of this size together."""
    found, left = [], size
    for number in count(1):
        found.append(entry(number))
        left -= len(json.dumps(found[-1])) + 2
        if left < 0:
            return found
    raise AssertionError


def address(number: int) -> str:
    return f"11.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def ports(numbers: int) -> list[Json]:
    return [{"name": f"p{it}", "port": it % 65535 + 1, "protocol": "TCP"} for it in range(numbers)]


def service(numbers: int = 1, **fields: Any) -> Json:
    ingress = fields.pop("ingress", None)
    found = manifests.service(NAME, ["10.96.0.20"], ports(numbers), namespace=NAMESPACE, **fields)
    return found | ({"status": {"loadBalancer": {"ingress": ingress}}} if ingress else {})


def slice(endpoints: list[Json], numbers: int = 1, name: str = NAME) -> Json:
    return manifests.endpoint_slice(
        NAME, "IPv4", endpoints, ports(numbers), namespace=NAMESPACE, name=name
    )


def entry(number: int, **fields: Any) -> Json:
    return {"addresses": [address(number)], "nodeName": f"n{number % 100}", **fields}


def slices(
    size: int, per_slice: int, numbers: int = 1, make: Callable[[int], Json] = entry
) -> list[Json]:
    """Slices of this size together, with different endpoints."""
    every, found = count(1), list[Json]()
    while size > 0:
        endpoints = [make(it) for it in islice(every, per_slice)]
        found.append(slice(endpoints, numbers, f"t-{len(found)}"))
        size -= len(json.dumps(found[-1]))
    return found


def hinted(number: int) -> Json:
    zones = [{"name": f"zone-{number}-{it}"} for it in range(8)]
    return entry(number, hints={"forZones": zones}, zone=f"zone-{number}-0")


def with_metadata(found: Json, **fields: Any) -> Json:
    return found | {"metadata": found["metadata"] | fields}


CASES = (
    Case("ports", lambda size: [service(size // 50)]),
    Case("externalIPs", lambda size: [service(externalIPs=fill(size, address))]),
    Case(
        "externalIPs, with 1,000 ports",
        lambda size: [service(1000, externalIPs=fill(size, address))],
    ),
    Case(
        "externalIPs that are no addresses",
        lambda size: [service(externalIPs=fill(size, lambda it: "x"))],
    ),
    Case(
        "load balancer addresses, with 1,000 ports",
        lambda size: [service(1000, ingress=fill(size, lambda it: {"ip": address(it)}))],
    ),
    Case(
        "loadBalancerSourceRanges, with 1,000 ports",
        lambda size: [
            service(
                1000,
                ingress=[{"ip": "203.0.113.1"}],
                loadBalancerSourceRanges=fill(size, lambda it: f"{address(it)}/32"),
            )
        ],
    ),
    Case("clusterIPs", lambda size: [with_cluster_ips(fill(size, address))]),
    Case(
        "annotations of ours",
        lambda size: [
            with_metadata(
                service(), annotations=dict.fromkeys(fill(size, "ebpflb.io/{}".format), "")
            )
        ],
    ),
    Case(
        "labels",
        lambda size: [with_metadata(service(), labels={f"l{it}": "x" for it in range(size // 15)})],
    ),
    Case("endpoints", lambda size: [service(), *slices(size, 1000)]),
    Case(
        "addresses of endpoints",
        lambda size: [
            service(),
            slice(
                fill(size, lambda it: entry(it, addresses=[address(it)] * 100))
            ),
        ],
    ),
    Case("zones and hints", lambda size: [service(), *slices(size, 1000, make=hinted)]),
    Case(
        "endpoints that are no addresses",
        lambda size: [service(), *slices(size, 1000, make=lambda it: {"addresses": ["x"]})],
    ),
    Case("slices", lambda size: [service(), *slices(size, 1)]),
    Case("slices, with 1,000 ports", lambda size: [service(1000), *slices(size, 1, 1000)]),
    Case(
        "ports of a slice",
        lambda size: [service(1000), slice([entry(1)], min(MOST_PORTS, size // 60))],
    ),
    Case(
        "endpoints, with 1,000 ports of Service and slices",
        lambda size: [service(1000), *slices(size, 1000, 1000)],
    ),
)  # fmt: skip


def with_cluster_ips(found: list[str]) -> Json:
    made = service()
    families = {"clusterIPs": found, "ipFamilies": ["IPv4"] * len(found)}
    return made | {"spec": made["spec"] | families}


class Node:
    """The parts of an agent that see the objects."""

    def __init__(self) -> None:
        self.cluster = ClusterState("node")
        options = SimpleNamespace(namespace_share=0.8, shadow=False, manifests=None)
        flowtable = SimpleNamespace(enabled=False, start_over=lambda owners: None)
        sync = SimpleNamespace(
            options=options, flowtable=flowtable, write_settings=lambda covering: None
        )
        datapath = SimpleNamespace(
            capacity=CAPACITY, read_contents=MapContents, service_ranges=list, apply=pack
        )
        self.sync = ServiceSync(cast(Any, datapath), self.cluster, cast(Any, sync))
        self.longest = 0.0
        self.others = count(1)  # changes of another namespace's Service
        self.waits: list[float] = []  # seconds of processor time until each of them was written

    def apply(self, texts: list[tuple[Kind, bytes]]) -> None:
        for kind, text in texts:
            self._timed(lambda kind=kind, text=text: self._change(kind, text))  # type: ignore[misc]
        while self.cluster.changed_services or self.sync.backlog:
            if self.sync.backlog:
                time.sleep(max(0.0, self.sync.backlog.due - time.monotonic()))
            self._timed(self.sync.write)

    def apply_beside_another(self, texts: list[tuple[Kind, bytes]]) -> None:
        """Take the messages of each turn, and write a slice, as the agent's loop does."""
        another = manifests.service(
            OTHER.service, ["10.96.0.21"], ports(1), namespace=OTHER.namespace
        )
        self._change(Kind.SERVICE, json.dumps(another).encode())
        left, began = iter(texts), self._change_another()
        tenant = Key(NAMESPACE, NAME)
        while (
            (text := next(left, None))
            or tenant in self.cluster.changed_services
            or tenant in self.sync.backlog
        ):
            if text:
                self._change(*text)
            self.sync.write()
            if self._is_written():
                self.waits.append(time.process_time() - began)
                began = self._change_another()

    def _change_another(self) -> float:
        self.address = address(next(self.others))
        endpoint = {"addresses": [self.address]}
        words = OTHER.service, "IPv4", [endpoint], ports(1)
        found = manifests.endpoint_slice(*words, namespace=OTHER.namespace)
        began = time.process_time()
        self._change(Kind.ENDPOINT_SLICE, json.dumps(found).encode())
        return began

    def _is_written(self) -> bool:
        found = self.sync.planner.actual.get(OTHER, NO_ENTRIES).backends
        return [str(each.address) for each in found] == [self.address]

    def _change(self, kind: Kind, text: bytes) -> None:
        key, found = decoding.read_object(kind, text, "bench")
        self.cluster.apply(Changed(kind, key, found))

    def _timed(self, do: Callable[[], object]) -> None:
        begun = time.process_time()
        do()
        self.longest = max(self.longest, time.process_time() - begun)

    def start(self, texts: list[tuple[Kind, bytes]]) -> None:
        for each in Kind:
            found = [decoding.read_object(kind, it, "") for kind, it in texts if kind is each]
            self.cluster.apply(Replaced(each, dict(found)))
        self.sync.write()


def pack(plan: Plan) -> None:
    """Pack the largest parts as the maps do."""
    for part in ("slots", "backend_slots", "backend_names", "services", "source_ranges"):
        spec = layout.MAPS[part]
        key, value = records.codec(spec.key), records.codec(spec.value)
        check = layout.check_in(spec)
        for its_key, its_value in getattr(plan, part):
            packed = key.pack(its_key)
            check.signed(packed, value.pack(its_value))


def main() -> None:
    """``bytes`` of the object, or of all slices together."""
    run_bench(__doc__, _measured, bytes=1_500_000)


def _measured(wanted: argparse.Namespace) -> Lines:
    for case in CASES:
        objects = case.objects(wanted.bytes)
        texts = [(Kind(it["kind"]), json.dumps(it).encode()) for it in objects]
        size = sum(len(text) for _, text in texts)
        yield f"{case.what}: {len(objects)} objects, {size / 1e6:.1f} MB"
        yield from _in_a_child(lambda texts=texts: _costs(texts))  # type: ignore[misc]


def _costs(texts: list[tuple[Kind, bytes]]) -> Iterator[Row]:
    node, before = Node(), memory()
    node.start([])
    cpu = time.process_time()
    node.apply(texts)
    yield Row("a change: processor time", 1e3 * (time.process_time() - cpu), "ms")
    yield Row("a change: longest step", 1e3 * node.longest, "ms", 100)
    yield Row("memory", memory() - before, "MB")
    beside = Node()
    beside.start([])
    beside.apply_beside_another(texts)
    yield Row("another's change: most", 1e3 * max(beside.waits), "ms", 100)
    cpu = time.process_time()
    with startup():
        Node().start(texts)
    yield Row("a start: processor time", 1e3 * (time.process_time() - cpu), "ms")


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _in_a_child(costs: Callable[[], Iterator[Row]]) -> list[Row]:
    """Run in a child, whose memory is this case's alone."""
    reading, writing = os.pipe()
    if not os.fork():
        os.close(reading)
        rows = [[row.what, row.value, row.unit, row.target] for row in costs()]
        os.write(writing, json.dumps(rows).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    os.wait()
    if not found:
        sys.exit("a child has ended")
    return [Row(*each) for each in json.loads(found)]


if __name__ == "__main__":
    main()
