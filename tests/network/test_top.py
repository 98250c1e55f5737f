# SPDX-License-Identifier: Apache-2.0
"""``ebpflb top``: its rates are those of the connections that were made."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from ebpflb.cli.top import ALL
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.tools import rates
from ebpflb.tools.rates import Rate
from tests.kit import answers, forked, requests
from tests.kit.cluster import TARGET, VIP, Cluster, endpoint, web
from tests.kit.sockets import Sockets
from tests.load import paused

WEB, QUIET = "default/web:tcp/TCP", "default/quiet:tcp/TCP"
QUIET_VIP, EMPTY_VIP = "10.96.0.30", "10.96.0.31"
TCP = {"name": "tcp", "port": TARGET, "protocol": "TCP"}
REQUESTS_TIME = str(20 * paused(0.025))  # seconds in which a client asks 20 times or more


@pytest.fixture(autouse=True)
def published(cluster: Cluster, pods: list[Host]) -> None:
    """default/web with two endpoints, default/quiet with another one, default/empty with none."""
    cluster.publish(
        web(endpoint(pods[0]), endpoint(pods[1])),
        manifests.service("quiet", [QUIET_VIP], [{**TCP, "port": 80}]),
        manifests.endpoint_slice("quiet", "IPv4", [endpoint(pods[2])], [TCP]),
        manifests.service("empty", [EMPTY_VIP], [{**TCP, "port": 80}]),
    )


def command(cluster: Cluster, *words: str) -> "subprocess.CompletedProcess[str]":
    return forked.run(
        "top", *words, "--state-dir", str(cluster.agent.paths.state), netns=cluster.node.netns
    )


def found(cluster: Cluster, *words: str) -> list[Rate]:
    """The rows of ``-o json``, in their order."""
    done = command(cluster, "-o", "json", *words)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [rate(answers.read(line)) for line in done.stdout.splitlines()]


def rate(row: dict[str, Any]) -> Rate:
    """What JSON has of a rate."""
    row["backend"] = row.pop("endpoint") or ""
    return msgspec.convert(row | {"refused": row["refused"] or 0.0}, Rate)


@contextmanager
def traffic(cluster: Cluster) -> Iterator[None]:
    """Connections to default/web, one after the other, of which none fails."""
    client = cluster.start_client(cluster.client, "tcp", VIP, pause=0.01)
    try:
        yield
    finally:
        counted = cluster.stop_client(client)
    assert not counted["errors"], counted


def is_busy(rows: list[Rate], pods: list[Host]) -> bool:
    """Whether there were connections to each endpoint of the Service under traffic meanwhile: then
    it is the first, with both endpoints, and the others have no rate.
    """
    if not all(it.new for it in rows if it.service == WEB):
        return False
    head, *backends = rows[:3]
    assert (head.service, head.backend) == (WEB, "")
    assert {(it.service, it.backend) for it in backends} == {
        (WEB, f"{pod.v4}:{TARGET}") for pod in pods[:2]
    }
    assert {it.pod for it in backends} == {pod.name for pod in pods[:2]}
    assert not any(it.new for it in rows[3:])
    return True


def test_rates_are_the_connections_that_were_made(
    cluster: Cluster, pod: Sockets, pods: list[Host]
) -> None:
    """In one second of which the length is set: so many of each Service and of each backend, and
    so many that were refused; what is open is that of now.
    """
    before = rates.sample(cluster.maps)
    answers = [requests.tcp(pod, VIP).name for _ in range(12)]
    answers += [requests.tcp(pod, QUIET_VIP).name for _ in range(5)]
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            requests.tcp(pod, EMPTY_VIP)
    with requests.tcp_socket(pod, QUIET_VIP) as client:
        client.connect((QUIET_VIP, 80))
        answers.append(pods[2].name)
        after = rates.sample(cluster.maps)
    rows = rates.rates(cluster.maps, before._replace(at=0.0), after._replace(at=1.0))
    services = {it.service: it for it in rows if not it.backend}
    assert len(services) == len([it for it in rows if not it.backend])
    assert [it.service for it in rows if not it.backend][:3] == [
        WEB,
        QUIET,
        "default/empty:tcp/TCP",
    ]
    assert (services[WEB].new, services[QUIET].new) == (12, 6)
    assert (services["default/empty:tcp/TCP"].new, services[WEB].refused) == (0, 0)
    assert services["default/empty:tcp/TCP"].refused == 3
    of_tcp = {it.backend: it.new for it in rows if it.backend and it.service in (WEB, QUIET)}
    assert of_tcp == {f"{host.v4}:{TARGET}": answers.count(host.name) for host in pods}
    assert services[QUIET].open == 1


def table_with_rate(cluster: Cluster, *words: str) -> "subprocess.CompletedProcess[str]":
    """A table of a time in which there were connections to the Service under traffic."""
    while True:
        done = command(cluster, "--once", "--interval", REQUESTS_TIME, *words)
        assert done.returncode == 0
        rows = [line.split() for line in done.stdout.splitlines()]
        if any(row[:2] == [WEB, ALL] and float(row[3]) for row in rows):
            return done


def test_under_traffic(cluster: Cluster, pods: list[Host]) -> None:
    """The busy Service comes first, with its backends; as JSON and as a table."""
    with traffic(cluster):
        wait_until("its rate", lambda: is_busy(found(cluster, "--interval", REQUESTS_TIME), pods))
        done = table_with_rate(cluster)
        first = table_with_rate(cluster, "--limit", "1")
    rows = [line.split() for line in done.stdout.splitlines()]
    at = rows.index(next(row for row in rows if row[:2] == [WEB, ALL]))
    assert float(rows[at][3]) > 0
    assert {row[1] for row in rows[at + 1 : at + 3]} == {f"{pod.v4}:{TARGET}" for pod in pods[:2]}
    assert QUIET in done.stdout and "\x1b" not in done.stdout
    assert WEB in first.stdout and QUIET not in first.stdout
    assert "more rows: --limit" in first.stderr
