# SPDX-License-Identifier: Apache-2.0
"""Tables of 80 columns, on a node with IPv4 and IPv6 and long names; -o wide cuts nothing."""

from collections.abc import Iterator

import pytest

from ebpflb.lab.hosts import Host
from tests.cli.doctors import published
from tests.kit import forked
from tests.kit.cluster import NODEPORT, PORT, Cluster

V6 = "fd00:96::10"
COMMANDS = [
    "flows list",
    "maps dump",
    "services list",
    "services get default/web",
    "history",
    "top --once --interval 0.2",
    f"explain [{V6}]:{PORT}",
    f"explain [{V6}]:{PORT} --from outside",
    "check",
    "doctor --no-canary",
]
ON_STATE_ALONE = ("flows", "maps", "explain", "top")
OF_THE_CGROUP = ("check", "doctor")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With connections of a pod."""
    with published(tmp_path_factory.mktemp("cluster")) as made:
        made.request(made.client, "tcp", V6, PORT, 2)
        yield made


@pytest.fixture(scope="module")
def outside(cluster: Cluster) -> Host:
    return cluster.lab.outside("outside", 7)


@pytest.fixture
def flows(cluster: Cluster, outside: Host) -> None:
    """Of both families; closed ones are swept within seconds."""
    for address in (cluster.node.v4, cluster.node.v6):
        cluster.request(outside, "tcp", address, NODEPORT, 2)


def lines(cluster: Cluster, words: str, *more: str) -> list[str]:
    first = words.split()[0]
    where = cluster.agent.where[: 2 if first in ON_STATE_ALONE else 4]
    if first in OF_THE_CGROUP:
        where = [*where, "--cgroup-root", str(cluster.node.cgroup)]
    done = forked.run(*words.split(), *where, *more, netns=cluster.node.netns)
    assert done.stderr == "" and done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("words", COMMANDS)
def test_columns(cluster: Cluster, flows: None, words: str) -> None:
    """No line is longer by default; -o wide says as much or more, with no ellipsis in a table."""
    narrow, wide = lines(cluster, words), lines(cluster, words, "-o", "wide")
    assert len(narrow) > 1
    assert [line for line in narrow if len(line) > 80] == []
    assert not any("…" in line for line in wide)


@pytest.mark.parametrize("words", ["audit", "status"])
def test_sentences(cluster: Cluster, words: str) -> None:
    """They are broken, and not cut; a word that is longer than a line stays whole, as a path."""
    found = lines(cluster, words)
    assert found and not any("…" in line for line in found)
    assert [line for line in found if len(line) > 80 and " " in line.strip()] == []


def test_flows_of_both_families(cluster: Cluster, flows: None) -> None:
    """Client, frontend and backend are whole, as far as 80 columns hold them."""
    said = "\n".join(lines(cluster, "flows list"))
    assert f"{cluster.node.v4}:{NODEPORT}" in said and f"[{cluster.node.v6}]:{NODEPORT}" in said
