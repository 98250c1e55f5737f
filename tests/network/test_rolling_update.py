# SPDX-License-Identifier: Apache-2.0
"""A rolling update on two nodes, of pods without `preStop` that end at once with SIGTERM.

Kubernetes tells the kubelet and writes the EndpointSlice at the same time. ebpflb can act only
after the slice is written: no connection that is opened afterwards fails. Connections that the pod
has accepted before are the pod's own.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Process
from tests.kit.lab_cluster import TARGET
from tests.kit.on_removal import is_idle, terminating
from tests.kit.parameters import both_engines
from tests.kit.two_nodes import Frontends, TwoNodes
from tests.load import scaled

WEB = Frontends(10)
CLIENTS = ("hooked", "cluster"), ("unhooked", "cluster"), ("outside", "nodeport")
UPDATES = scaled(3)  # of both nodes' pods
PAUSE = 0.005  # seconds between a client's connections
_numbers = count(20)  # of pods


class Pod(NamedTuple):
    """A pod, and the process that its kubelet ends."""

    host: Host
    server: Process

    def end(self) -> None:
        self.server.send_signal(signal.SIGTERM)
        self.server.wait()


def start_pod(two: TwoNodes, node: Host) -> Pod:
    number = next(_numbers)
    host = two.lab.pod(node, f"web-{number}", number, hooked=False)
    two.places[host] = node.name
    return Pod(host, two.start_program(host, "serve", host.name, str(TARGET)))


def publish(two: TwoNodes, pods: Sequence[Pod], leaving: Pod | None = None) -> None:
    """Publish the slice, and wait for both nodes; pods in ``leaving`` are still listed, as
    terminating.
    """
    listed = [pod.host for pod in pods] + ([leaving.host] if leaving else [])
    said = two.service("web", 10, *listed)
    two.publish(terminating(said, leaving.host) if leaving else said)


@contextmanager
def clients_of_both_nodes(two: TwoNodes, counts: list[Any]) -> Iterator[None]:
    """Start clients that connect repeatedly by every path; add up their counts."""
    remote = two.lab.pod(two.far, f"remote-{next(_numbers)}", next(_numbers))
    ways = [(getattr(two, who), WEB.to(kind, two.near)) for who, kind in CLIENTS]
    ways += [(two.near, WEB.to("cluster", two.near, v6=True)), (remote, WEB.to("cluster", two.far))]
    pressing = [two.start_client(host, "tcp", *where, pause=PAUSE) for host, where in ways]
    yield
    counts += [two.stop_client(client) for client in pressing]


@both_engines
def test_a_rolling_update_fails_no_connection(two: TwoNodes) -> None:
    """Each pod ends when its slice says so and its requests are answered, without a sleep."""
    pods = {node: start_pod(two, node) for node in (two.near, two.far)}
    names = {pod.host.name for pod in pods.values()}
    publish(two, [*pods.values()])
    counts: list[Any] = []
    with clients_of_both_nodes(two, counts):
        for node in [*pods] * UPDATES:
            former, pods[node] = pods[node], start_pod(two, node)
            names.add(pods[node].host.name)
            publish(two, [*pods.values(), former])
            publish(two, [*pods.values()], leaving=former)
            wait_until("its requests are answered", partial(is_idle, former.host))
            former.end()
            publish(two, [*pods.values()])
    assert [each["errors"] for each in counts] == [{}] * len(counts)
    assert {name for each in counts for name in each["names"]} == names


@both_engines
def test_a_pod_that_ends_before_its_slice_refuses_until_the_slice_is_in_force(
    two: TwoNodes,
) -> None:
    """Failing connections are refused at once, and none fails after the slice is in force."""
    former, latter = start_pod(two, two.near), start_pod(two, two.far)
    publish(two, [former, latter])
    former.end()
    before = [ask(two, *client) for client in CLIENTS]
    assert [each["errors"].keys() for each in before] == [{"ECONNREFUSED"}] * len(CLIENTS)
    publish(two, [latter], leaving=former)
    after = [ask(two, *client) for client in CLIENTS]
    assert [(each["errors"], *each["names"]) for each in after] == [({}, latter.host.name)] * 3


def ask(two: TwoNodes, who: str, kind: str) -> Any:
    return two.request(getattr(two, who), "tcp", *WEB.to(kind, two.near), 40)
