# SPDX-License-Identifier: Apache-2.0
"""The share of the open connections that an endpoint has whose connections last longer.

    sudo .venv/bin/python -m bench.shares [--nodes N] [--schedulers NAME,...]
        [--connections OPEN,...]

Each node is a namespace with an agent of its own and a client, which opens connections at random
times and holds each for 4 s on average; at one of the Service's 30 endpoints they last three times
as long. The share of this endpoint is the number of its open connections, on all nodes, divided by
that of an endpoint on average: 1.0 is fair, 2.8 is what random draws give. A node counts its own
connections only, so what matters is how many each node has open.
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

from bench import held_program
from bench.report import Lines, Row
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.lab import manifests
from ebpflb.lab.agents import LabAgent
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.annotations import LEAST_CONNECTIONS, RANDOM, ROUND_ROBIN, SCHEDULER_ANNOTATION

PREFIX = "ebpflb-shares"
PROGRAM = Path(held_program.__file__)
PORT, TARGET = 80, 8080
WAYS = {RANDOM: "10.96.0.11", ROUND_ROBIN: "10.96.0.12", LEAST_CONNECTIONS: "10.96.0.13"}
ENDPOINTS = [f"198.51.100.{number}" for number in range(101, 131)]
SLOW = ENDPOINTS[0]
LIFE = 4  # seconds, of other endpoints' connections
WARM, SECONDS = 10 * LIFE, 10 * LIFE


def main() -> None:
    run_bench(__doc__, _measured, nodes=30, schedulers=",".join(WAYS), connections="300,900,3000")


def _measured(wanted: argparse.Namespace) -> Lines:
    with temporary_lab(PREFIX) as (lab, folder, stack):
        nodes = _nodes(lab, folder, stack, wanted.nodes)
        yield f"the slow endpoint's share, {wanted.nodes} nodes, {len(ENDPOINTS)} endpoints"
        for name in wanted.schedulers.split(","):
            for connections in map(int, wanted.connections.split(",")):
                print_step(f"{name}, {connections} connections")
                found = _open(nodes, WAYS[name], connections / wanted.nodes)
                share = found[SLOW] / sum(found.values()) * len(ENDPOINTS)
                note = f"{sum(found.values()):.0f} open on average"
                at = connections / wanted.nodes
                yield Row(name, share, "", note=note, at=at, axis="open a node")


def _nodes(lab: Lab, folder: Path, stack: ExitStack, count: int) -> list[Host]:
    """Start the servers and the agents; return the nodes."""
    servers = lab.outside("servers", 1)
    for address in ENDPOINTS:
        servers.ip(f"address add {address}/24 dev eth0")
    lab.keep_ready(servers.python(PROGRAM, "serve", str(TARGET), stdout=PIPE))
    nodes = [lab.node(f"node-{number}", number) for number in range(1, count + 1)]
    text = manifests.text(_objects())
    for number, node in enumerate(nodes):
        print_step(f"agent {number + 1} of {count}")
        agent = LabAgent(lab, node, folder)
        stack.callback(agent.close)
        own = manifests.text([manifests.node(node.name, node.v4, node.v6)])
        manifests.replace(agent.manifests / "all.yaml", f"{text}---\n{own}")
        agent.start()
    return nodes


def _objects() -> list[manifests.Manifest]:
    target = {"name": "http", "protocol": "TCP", "port": TARGET}
    there = [
        manifests.endpoint(address, node="elsewhere", target=f"pod-{address}")
        for address in ENDPOINTS
    ]
    found = list[manifests.Manifest]()
    for name, address in WAYS.items():
        chosen = {SCHEDULER_ANNOTATION: name}
        port = {**target, "port": PORT}
        found.append(manifests.service(name, [address], [port], annotations=chosen))
        found.append(manifests.endpoint_slice(name, "IPv4", there, [target]))
    return found


def _open(nodes: list[Host], address: str, each: float) -> dict[str, float]:
    """Return the open connections of each endpoint on average, if a node has ``each`` of them
    where all endpoints have the same share.
    """
    mean = LIFE * (1 + (held_program.FACTOR - 1) / len(ENDPOINTS))
    words = (address, PORT, each / mean, LIFE, SLOW, WARM, SECONDS)
    clients = [node.python(PROGRAM, "hold", *map(str, words), stdout=PIPE) for node in nodes]
    found = dict.fromkeys(ENDPOINTS, 0.0)
    for client in clients:
        for at, count in json.loads(client.communicate()[0]).items():
            found[at] += count
    return found


if __name__ == "__main__":
    main()
