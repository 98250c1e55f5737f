# SPDX-License-Identifier: Apache-2.0
"""120 Services with the names that real clusters have: on terminals, and in a pipe."""

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.manifests import Manifest
from tests.cli.doctors import published
from tests.kit import forked, terminal
from tests.kit.cluster import Cluster, endpoint, web

NUMBER = 120
NAMESPACES = ("ingress-nginx-production", "payments-staging-europe-west", "monitoring")
_WORDS = "ingress-nginx-controller-admission-webhook-payments-gateway-metrics"
_NODE = "ip-10-0-113-27.eu-central-1.compute.internal"
PORTS = [
    {"name": "https-webhook", "port": 443},
    {"name": "prometheus-metrics", "port": 10254},
    {"name": "diameter", "port": 3868, "protocol": "SCTP"},
]
COMMANDS = (
    "services list",
    "services list -o wide",
    "services get {0}",
    "services get {1}",
    "explain [fd00:96:ab12:cdef:1234:5678:9:1]:443",
    "maps dump services slots backend_names",
    "history --limit 0",
    "top --once --interval 0.1 --limit 0",
    "status",
)


def name(number: int) -> str:
    """NAMESPACE/NAME; the name has 30 to 60 characters."""
    length = 30 + number * 30 // (NUMBER - 1)
    return f"{NAMESPACES[number % len(NAMESPACES)]}/{_WORDS[: length - 5].rstrip('-')}-x{number:03}"


def addresses(number: int) -> list[str]:
    """Of both families each third time."""
    v6 = [f"fd00:96:ab12:cdef:1234:5678:9:{number + 1:x}"] if number % 3 == 0 else []
    return [f"10.96.200.{number + 1}", *v6]


def objects(number: int) -> Iterator[Manifest]:
    """Some have a NodePort, some SCTP, some no endpoint, all others one that is not ready."""
    namespace, _, short = name(number).partition("/")
    ports: list[Manifest] = [dict(port) for port in PORTS[: 1 + number % 3]]
    spec: dict[str, Any] = {}
    if number % 5 == 0:
        spec = {"type": "NodePort"}
        ports[0] |= {"nodePort": 30500 + number}
    yield manifests.service(short, addresses(number), ports, namespace=namespace, **spec)
    for family in ("IPv4", "IPv6")[: len(addresses(number))]:
        start = "10.244.200." if family == "IPv4" else "fd00:244:aaaa:bbbb:cccc:dddd:eeee:f"
        pods = [
            manifests.endpoint(
                f"{start}{2 * number + index}",
                node=_NODE,
                target=f"{short[:47]}-7d4b9c6f5-x{index}z9q",
                ready=index == 0,
            )
            for index in range(2 if number % 8 else 0)
        ]
        targets = [{**port, "port": 8443} for port in PORTS[: 1 + number % 3]]
        yield manifests.endpoint_slice(short, family, pods, targets, namespace=namespace)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with published(tmp_path_factory.mktemp("cluster")) as made:
        every = [each for number in range(NUMBER) for each in objects(number)]
        made.publish(web(endpoint(made.web[0])), every)
        yield made


def words_of(cluster: Cluster, command: str) -> list[str]:
    words = command.format(name(7), name(8)).split()
    where = cluster.agent.where[: 2 if words[0] in ("top", "maps") else 4]
    return [*words, *where]


def piped(cluster: Cluster, command: str) -> list[str]:
    done = forked.run(*words_of(cluster, command), netns=cluster.node.netns)
    assert done.returncode in (0, 3, 4), done.stderr
    return done.stdout.splitlines()


def on_terminal(cluster: Cluster, command: str, columns: int) -> list[str]:
    with terminal.opened(columns) as (screen, out), open(os.devnull, "w") as errors:
        process = forked.start(
            words_of(cluster, command),
            netns=cluster.node.netns,
            env=terminal.environment(),
            stdout=out,
            stderr=errors,
        )
        out.close()
        shown = terminal.read(screen)
    assert process.wait(60) in (0, 3, 4)
    return shown.splitlines()


def settled(line: str) -> str:
    """Without ages, and what they do to a column's width."""
    return " ".join(re.sub(r"\b\d+ (s|min)\b", "AGE", line).split())


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_cut_in_a_pipe(cluster: Cluster, command: str) -> None:
    """No line has an ellipsis, and a list has every row, with its name and address whole."""
    lines = piped(cluster, command)
    assert lines and not any("…" in line for line in lines)
    if command.startswith("services list"):
        rows = {line.split()[0]: line.split()[1].split(",") for line in lines[1:]}
        assert len(rows) == NUMBER + 2
        for number in range(NUMBER):
            v4, *v6 = addresses(number)
            wanted = [v4, *(f"[{each}]" for each in v6)]
            assert rows[name(number)] == (wanted if "wide" in command else wanted[:1])


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_shows_the_same(cluster: Cluster, command: str, columns: int) -> None:
    """Only a last column of free text is shortened there, after a whole word; a list ends after 100
    rows.
    """
    whole, shown = piped(cluster, command), on_terminal(cluster, command, columns)
    assert len(shown) == (101 if command.startswith("services list") else len(whole))
    for line, full in zip(map(settled, shown), map(settled, whole), strict=False):
        if line != full:
            begin = line.removesuffix("…")
            assert begin != line and full.startswith(begin)
            assert not full[len(begin)].isalnum(), "a part of a word would be another one"
