# SPDX-License-Identifier: Apache-2.0
"""docs/output.md describes every word of `-o json`, and tables have the same words."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.lab.hosts import Host
from tests.cli.described import WORDS, faults
from tests.cli.doctors import published
from tests.kit import forked
from tests.kit.cluster import NODEPORT, PORT, VIP, Cluster

COMMANDS = {
    "status": "status",
    "version": "version",
    "doctor --no-canary": "check",
    "services list": "list",
    "services get default/web": "get",
    "flows list": "flows",
    "history": "history",
    "explain default/web": "explain",
    "explain default/web --from outside": "explain",
    "maps dump --all": "maps",
}
OF_ONE_OBJECT = {"status", "version", "get", "explain"}
RARE = {"reason", "slice", "notes", "cause"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with published(tmp_path_factory.mktemp("cluster")) as made:
        made.request(made.client, "tcp", VIP, PORT, 2)
        yield made


@pytest.fixture(scope="module")
def outside(cluster: Cluster) -> Host:
    return cluster.lab.outside("outside", 7)


@pytest.fixture
def flows(cluster: Cluster, outside: Host) -> None:
    """Let a client outside connect to the NodePort, in both families."""
    for address in (cluster.node.v4, cluster.node.v6):
        cluster.request(outside, "tcp", address, NODEPORT, 2)


def printed(cluster: Cluster, words: str, *more: str) -> str:
    first = words.split()[0]
    where = cluster.agent.where[: 2 if first in ("flows", "maps") else 4]
    where = [] if first == "version" else where
    if first in ("check", "doctor"):
        where = [*where, "--cgroup-root", str(cluster.node.cgroup)]
    done = forked.run(*words.split(), *where, *more, netns=cluster.node.netns)
    assert done.returncode in (0, 1, 3), done.stderr
    return done.stdout


def test_every_word_is_described(cluster: Cluster, flows: None) -> None:
    """Each word has the type that the page says, all lists have one form, and the columns of the
    widest table are words of the items. The page has no word that only a former version had.
    """
    for words, command in COMMANDS.items():
        said = json.loads(printed(cluster, words, "-o", "json"))
        found = [said]
        if command not in OF_ONE_OBJECT:
            assert said.keys() == {"items", "notes"}
            assert all(isinstance(note, str) for note in said["notes"])
            found = said["items"]
        assert found and not [*faults(found, command)]
        if command not in OF_ONE_OBJECT:
            heads = printed(cluster, words, "-o", "wide").splitlines()[0].lower()
            assert {*heads.replace("-", "_").split()} <= {word for item in found for word in item}
        if command not in ("maps", "status"):
            described = {name for name, word in WORDS.items() if command in word.commands}
            assert described - RARE <= inside(said)


def inside(value: Any) -> set[str]:
    """Yield all words of a value, at any depth."""
    if isinstance(value, list):
        return {word for each in value for word in inside(each)}
    if isinstance(value, dict):
        return value.keys() | {word for each in value.values() for word in inside(each)}
    return set()
