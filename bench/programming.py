# SPDX-License-Identifier: Apache-2.0
"""Network programming latency as ClusterLoader2 reads it, beside the exact times.

    sudo .venv/bin/python -m bench.programming [--services N] [--seconds S]

The objects are those of ClusterLoader2's test `load`: half of the pods are in groups of 5, a
quarter in groups of 30, and a quarter in groups of 250. Each group has a Service. Pods are replaced
as in rolling updates, first 10 per second (ClusterLoader2's rate), then 100. Each replacement is a
change of one EndpointSlice.

Meanwhile the endpoint of one more Service is replaced again and again, and a client waits for it:
that is the exact time. ClusterLoader2's figure is a quantile of the proxy's own histogram, whose
first bucket ends at 0.25 s: of proxies that are faster it says 0.125 and 0.2475 s.

With a kube-proxy's binary in KUBE_PROXY the same is measured of its modes nftables and iptables,
with its usual settings, each on a node of its own, afterwards.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench import api_program, histogram, targets
from bench.api_lab import ApiNode, NodeApi, Sizes, serve_pods
from bench.connect_lab import Client
from bench.report import Lines, Row, percentile, row_of
from bench.result import run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.lab import cni
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab

PREFIX = "ebpflb-programming"
GROUPS = {5: 1 / 2, 30: 1 / 4, 250: 1 / 4}  # pods of a group: the share of all pods
RATES = 10, 100  # pods a second
PAUSE = 0.2  # seconds between two changes of the measured Service, and up to as much again
POLL, SLOW_POLL = 0.0005, 0.005  # seconds: conntrack keeps each connection for another 10 s
QUANTILES = 0.5, 0.99
KUBE_PROXY = os.environ.get("KUBE_PROXY", "")
_METRICS = "from urllib.request import urlopen as get; print(get('{}').read().decode())"
_URL = "http://127.0.0.1:10249/metrics"


def main() -> None:
    """Measure ``seconds`` of changes for each rate."""
    run_bench(__doc__, _measured, services=1000, seconds=60.0)


def load_sizes(services: int) -> Sizes:
    """Return the number of groups with each number of pods, for this number of Services."""
    pods = services / sum(share / size for size, share in GROUPS.items())
    big = [[round(pods * GROUPS[size] / size), size] for size in (30, 250)]
    return [[services - sum(groups for groups, _ in big), 5], *big]


class Side:
    """A proxy on a node of its own, with its API server and a client."""

    name = "ebpflb"
    poll = POLL  # seconds between two connections of the client
    target_p50: float | None = targets.FIRST_ANSWER_P50
    target_p99: float | None = targets.FIRST_ANSWER_P99

    def __init__(self, lab: Lab, node: Host, api: NodeApi) -> None:
        self.node, self.api, self.turn = node, api, 0
        self.client = Client(lab, lab.pod(node, "client", 2))

    def move(self) -> float:
        self.turn += 1
        return self.api.move(self.client, self.turn % 2, pause=self.poll)

    def latencies(self) -> dict[str, float]:
        """Return the histogram that the proxy serves."""
        words = [*self.node.enter, sys.executable, "-IS", "-c", _METRICS.format(_URL)]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return histogram.samples(text, histogram.PROGRAMMING)


class KubeProxy(Side):
    """kube-proxy in one of its modes."""

    poll = SLOW_POLL
    target_p50 = target_p99 = None

    def __init__(self, lab: Lab, node: Host, folder: Path, sizes: Sizes, mode: str) -> None:
        super().__init__(lab, node, NodeApi(lab, node, folder, serve_pods(lab, node), sizes))
        said = subprocess.run([KUBE_PROXY, "--version"], capture_output=True, text=True, check=True)
        self.name = f"kube-proxy {said.stdout.split()[-1].removeprefix('v')}, {mode}"
        self.mode = mode
        self.api.listen()
        config = folder / "kube-proxy.yaml"
        config.write_text(json.dumps(self._configuration()))
        with (folder / "kube-proxy.log").open("w") as log:
            command = [KUBE_PROXY, f"--config={config}"]
            lab.keep(node.start(command, stdout=log, stderr=log))
        wait_until("kube-proxy serves", self._serves)

    def _configuration(self) -> dict[str, object]:
        client = {"kubeconfig": str(self.api.kubeconfig), "contentType": "application/json"}
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": self.mode,
            "hostnameOverride": self.node.name,
            "clientConnection": client,
            "featureGates": {"NFTablesProxyMode": True},  # until 1.32
            "clusterCIDR": cni.NETWORKS[0],
            "conntrack": {"maxPerCore": 0, "min": 0},
        }

    def _serves(self) -> bool:
        """Whether its rules, which come all at once, exist."""
        command = ["nft", "list", "map", "ip", "kube-proxy", "service-ips"]
        if self.mode == "iptables":
            command = ["iptables-save", "-t", "nat"]
        words = [*self.node.enter, *command]
        return api_program.ADDRESS in subprocess.run(words, capture_output=True, text=True).stdout


def _measured(wanted: argparse.Namespace) -> Lines:
    sizes = load_sizes(wanted.services)
    rows = {rate: list[Row]() for rate in RATES}
    for start in (_ebpflb, _nftables, _iptables) if KUBE_PROXY else (_ebpflb,):
        with temporary_lab(PREFIX) as (lab, folder, stack):
            print_step(f"starting{start.__name__.replace('_', ' ')}")
            side = start(lab, folder, stack, sizes)
            for rate in RATES:
                rows[rate] += _latencies(side, rate, wanted.seconds)
    services, pods = sum(n for n, _ in sizes), sum(n * size for n, size in sizes)
    for rate in RATES:
        yield f"{rate} pods replaced a second: {services:,} Services, {pods:,} pods"
        yield from rows[rate]


def _ebpflb(lab: Lab, folder: Path, stack: ExitStack, sizes: Sizes) -> Side:
    node = lab.node("ours", 1)
    api = ApiNode(lab, node, folder, stack, serve_pods(lab, node), sizes)
    api.listen()
    api.agent.start()
    api.wait_for_quiet()
    return Side(lab, node, api)


def _nftables(lab: Lab, folder: Path, stack: ExitStack, sizes: Sizes) -> Side:
    return KubeProxy(lab, lab.node("theirs", 1), folder, sizes, "nftables")


def _iptables(lab: Lab, folder: Path, stack: ExitStack, sizes: Sizes) -> Side:
    return KubeProxy(lab, lab.node("theirs", 1), folder, sizes, "iptables")


def _latencies(side: Side, rate: int, seconds: float) -> Iterator[Row]:
    print_step(f"{side.name}: {rate} pods a second")
    before, end = side.latencies(), time.monotonic() + seconds
    side.api.api.do("begin", round(rate * seconds), rate)
    took = [side.move()]
    while time.monotonic() < end:
        time.sleep(PAUSE * (1 + random.random()))
        took.append(side.move())
    after = side.latencies()
    seen = {le: after[le] - before[le] for le in after}
    for share in QUANTILES:
        value = histogram.quantile(share, seen)
        yield Row(f"{side.name}: p{share * 100:.0f} by ClusterLoader2", 1e3 * value, "ms")
    mean, note = seen["sum"] / seen["count"], f"{seen['count']:.0f} changes"
    yield Row(f"{side.name}: mean of the metric", 1e3 * mean, "ms", None, note)
    p99, most = percentile(took, 0.99), f"most {max(took):.1f}, of {len(took)}"
    yield row_of(f"{side.name}: p50 to the first answer", took, "ms", side.target_p50)
    yield Row(f"{side.name}: p99 to the first answer", p99, "ms", side.target_p99, most)


if __name__ == "__main__":
    main()
