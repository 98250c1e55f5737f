# SPDX-License-Identifier: Apache-2.0
"""Tables of every command that lists, on a node with IPv4 and IPv6."""

from collections.abc import Iterator

import pytest

from ebpflb.lab.hosts import Host
from tests.cli.doctors import published
from tests.kit import forked
from tests.kit.cluster import NODEPORT, PORT, Cluster

V6 = "fd00:96::10"
COMMANDS = [
    "flows list",
    "maps dump --all",
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
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("words", COMMANDS)
def test_columns(cluster: Cluster, flows: None, words: str) -> None:
    """The first line has upper-case heads; in a pipe nothing is cut; --no-headers leaves the rows;
    -o wide has more columns, or the same.
    """
    shown, wide = lines(cluster, words), lines(cluster, words, "-o", "wide")
    heads = shown[0].split()
    assert len(shown) > 1 and heads == [head.upper() for head in heads]
    assert set(heads) <= set(wide[0].split())
    assert not any("…" in line for line in (*shown, *wide))
    rows = lines(cluster, words, "--no-headers")
    assert rows and not any(line.split()[:2] == heads[:2] for line in rows)


def test_flows_of_both_families(cluster: Cluster, flows: None) -> None:
    """Client, frontend and backend are whole."""
    said = "\n".join(lines(cluster, "flows list"))
    assert f"{cluster.node.v4}:{NODEPORT}" in said and f"[{cluster.node.v6}]:{NODEPORT}" in said
