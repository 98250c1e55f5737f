# SPDX-License-Identifier: Apache-2.0
"""Thousands of Services and their endpoints, as manifests.

The many are in files of 100 as JSON, which the agent reads forty times as fast as YAML: the
speed of a YAML parser is not what is measured. The one Service that is used and changed is a
YAML file of its own, as an operator would write it.

A ``NodePort`` is a Service that can be written as kube-proxy's rules as well (see ``kubeproxy``).
"""

import json
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple

import yaml

from ebpflb.lab import manifests

NAME, ADDRESS, PORT, TARGET = "web", "10.96.0.10", 80, 8080
FILE = f"{NAME}.yaml"
FILE_SIZE = 100  # services
NODES = 100  # that the endpoints are spread over
CIDR, CIDR6 = "10.96.0.0/12", "fd00:96::/112"  # of all cluster IPs
FIRST_NODE_PORT = 30100

_SERVICES, _ENDPOINTS = IPv4Address("10.100.0.1"), IPv4Address("10.128.0.1")


class NodePort(NamedTuple):
    """A Service of type NodePort: on PORT of its cluster IP, to TARGET of its endpoints."""

    name: str
    address: str
    number: int  # the node port
    protocols: tuple[str, ...]
    endpoints: tuple[tuple[str, str], ...]  # address, node

    def manifests(self) -> list[manifests.Manifest]:
        target = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in self.protocols]
        ports = [{**port, "port": PORT, "nodePort": self.number} for port in target]
        there = [
            manifests.endpoint(address, node=node, target=f"{self.name}-{number}")
            for number, (address, node) in enumerate(self.endpoints)
        ]
        return [
            manifests.service(self.name, [self.address], ports, type="NodePort"),
            manifests.endpoint_slice(self.name, "IPv4", there, target),
        ]


def node_ports(count: int, endpoints: int) -> list[NodePort]:
    """Return ``count`` other TCP Services with ``endpoints`` each, where no process listens."""
    return [
        NodePort(
            name=f"service-{number}",
            address=address(number),
            number=FIRST_NODE_PORT + number,
            protocols=("tcp",),
            endpoints=tuple(
                (str(_ENDPOINTS + i), f"node-{i % NODES}")
                for i in range(number * endpoints, (number + 1) * endpoints)
            ),
        )
        for number in range(count)
    ]


def write_node_ports(folder: Path, node: str, node_address: str, them: list[NodePort]) -> None:
    """Write them with the Node and the range of cluster IPs."""
    items = [manifests.service_cidr(CIDR), manifests.node(node, node_address)]
    items += [item for each in them for item in each.manifests()]
    _write(folder / "node-ports.json", items)


def measured(node: str, node_address: str, pod: str, address: str) -> str:
    """Write the file of the measured Service: TCP and UDP, one endpoint, and its Node."""
    target = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
    ports = [{**port, "port": PORT} for port in target]
    endpoint = manifests.endpoint(address, node=node, target=pod)
    documents = [
        manifests.node(node, node_address),
        manifests.service(NAME, [ADDRESS], ports),
        manifests.endpoint_slice(NAME, "IPv4", [endpoint], target),
    ]
    return yaml.safe_dump_all(documents, sort_keys=False)


def address(number: int) -> str:
    """Return the cluster IP of one of the many."""
    return str(_SERVICES + number)


def write_many(folder: Path, services: int, endpoints: int) -> None:
    """Write ``services`` Services that share ``endpoints`` evenly; no process listens there."""
    bounds = [endpoints * number // services for number in range(services + 1)] if services else []
    for first in range(0, services, FILE_SIZE):
        items = [
            item
            for number in range(first, min(first + FILE_SIZE, services))
            for item in _one_of_many(number, range(bounds[number], bounds[number + 1]))
        ]
        _write(folder / f"many-{first:05}.json", items)


def _write(path: Path, items: list[manifests.Manifest]) -> None:
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def _one_of_many(number: int, endpoints: range) -> list[manifests.Manifest]:
    name, port = f"service-{number}", {"name": "http", "port": PORT, "protocol": "TCP"}
    there = [
        manifests.endpoint(str(_ENDPOINTS + i), node=f"node-{i % NODES}", target=f"{name}-pod-{i}")
        for i in endpoints
    ]
    return [
        manifests.service(name, [address(number)], [port]),
        manifests.endpoint_slice(name, "IPv4", there, [port | {"port": TARGET}]),
    ]
