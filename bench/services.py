# SPDX-License-Identifier: Apache-2.0
"""Thousands of Services and their endpoints, as manifests.

The many lie in files of 100 as JSON, which the agent reads forty times as fast as YAML: the
speed of a YAML parser is not what is measured. The one Service that is asked and changed is a
YAML file of its own, as an operator would write it.
"""

import json
from ipaddress import IPv4Address
from pathlib import Path

import yaml

from ebpflb.lab import objects

NAME, ADDRESS, PORT, TARGET = "web", "10.96.0.10", 80, 8080
FILE = f"{NAME}.yaml"
FILE_SIZE = 100  # services
NODES = 100  # that the endpoints are spread over

_SERVICES, _ENDPOINTS = IPv4Address("10.100.0.1"), IPv4Address("10.128.0.1")


def asked(node: str, node_address: str, pod: str, address: str) -> str:
    """The file of the Service that is asked: over TCP and UDP, with one endpoint, and its Node."""
    target = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
    ports = [{**port, "port": PORT} for port in target]
    documents = [
        objects.node(node, node_address),
        objects.service(NAME, [ADDRESS], ports),
        objects.endpoint_slice(NAME, "IPv4", [_endpoint(address, node, pod)], target),
    ]
    return yaml.safe_dump_all(documents, sort_keys=False)


def address(number: int) -> str:
    """The cluster IP of one of the many."""
    return str(_SERVICES + number)


def write_many(folder: Path, services: int, endpoints: int) -> None:
    """``services`` Services that share ``endpoints`` evenly; nobody listens there."""
    bounds = [endpoints * number // services for number in range(services + 1)] if services else []
    for first in range(0, services, FILE_SIZE):
        items = [
            item
            for number in range(first, min(first + FILE_SIZE, services))
            for item in _one_of_many(number, range(bounds[number], bounds[number + 1]))
        ]
        path = folder / f"many-{first:05}.json"
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def _one_of_many(number: int, endpoints: range) -> list[objects.Object]:
    name, port = f"service-{number}", {"name": "http", "port": PORT, "protocol": "TCP"}
    there = [
        _endpoint(str(_ENDPOINTS + i), f"node-{i % NODES}", f"{name}-pod-{i}") for i in endpoints
    ]
    return [
        objects.service(name, [address(number)], [port]),
        objects.endpoint_slice(name, "IPv4", there, [port | {"port": TARGET}]),
    ]


def _endpoint(address: str, node: str, pod: str) -> objects.Object:
    return {
        "addresses": [address],
        "nodeName": node,
        "targetRef": {"kind": "Pod", "namespace": "default", "name": pod},
        "conditions": {"ready": True, "serving": True, "terminating": False},
    }
