# SPDX-License-Identifier: Apache-2.0
"""The real agent on real maps: what it leaves to the next one when it stops, and what that does."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from random import Random

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.model.packet_path import Engine
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web
from tests.load import scaled

SEED, ROUNDS, SERVICES = 9, max(2, scaled(4)), 60
LEFT = "the maps are not read"
LONGEST = 3.0  # seconds until an agent is killed or stopped: some of its start or all of it


@pytest.fixture(scope="module", params=[Engine.NETFILTER, Engine.FLOWS])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster"), engine=request.param) as made:
        yield made


@pytest.fixture
def logged(cluster: Cluster) -> Callable[[str], bool]:
    """Whether the agent has logged this since the test's start."""
    before = len(cluster.agent.log())
    return lambda text: text in cluster.agent.log()[before:]


def others(chance: Random) -> list[Manifest]:
    """Services with one to four endpoints; each change replaces some of them."""
    port = [{"name": "tcp", "port": 80, "protocol": "TCP"}]
    made = []
    for number in range(chance.randrange(SERVICES // 2, SERVICES)):
        there = [
            manifests.endpoint(f"10.99.{number}.{chance.randrange(1, 9)}", node="x", target="y")
            for _ in range(chance.randrange(1, 4))
        ]
        made.append(manifests.service(f"other-{number}", [f"10.96.7.{number}"], port))
        made.append(manifests.endpoint_slice(f"other-{number}", "IPv4", there, port))
    return made


def serve(cluster: Cluster) -> None:
    cluster.publish(web(*map(endpoint, cluster.web)), others(Random(SEED)))


def assert_right(cluster: Cluster) -> None:
    """Maps, hooks and nft's table are as a fresh list of the manifests says, and serve."""
    found = cluster.ebpflb("audit", "--cgroup-root", str(cluster.node.cgroup))
    assert (found.returncode, found.stderr) == (0, "No differences found\n"), found.stdout
    assert len(requests.backends(cluster.sockets(cluster.client), VIP)) == 3


def nft(cluster: Cluster, words: str) -> None:
    """With the flow tables there is no table of ours."""
    command = ["ip", "netns", "exec", cluster.node.netns, "nft", *words.split()]
    subprocess.run(command, check=cluster.engine is Engine.NETFILTER)


def test_it_is_known(cluster: Cluster, logged: Callable[[str], bool]) -> None:
    """After a clean stop nothing is read, nothing is written, and all is right."""
    serve(cluster)
    cluster.agent.stop()
    before = cluster.maps["settings"].get(0)
    cluster.agent.start()
    assert logged(LEFT)
    assert cluster.maps["settings"].get(0) == before
    assert_right(cluster)


def test_a_killed_agent_leaves_nothing(cluster: Cluster, logged: Callable[[str], bool]) -> None:
    """It knew the maps from the last one, and may have written since."""
    serve(cluster)
    cluster.agent.stop()
    cluster.agent.start()
    cluster.agent.stop(signal.SIGKILL)
    before = cluster.agent.log()
    cluster.agent.start()
    assert LEFT not in cluster.agent.log().removeprefix(before)
    assert_right(cluster)


def test_a_change_meanwhile(cluster: Cluster, logged: Callable[[str], bool]) -> None:
    """Services that came, changed and went while no agent ran are planned from what was left."""
    serve(cluster)
    cluster.agent.stop()
    cluster.write(web(*map(endpoint, cluster.web)), others(Random(SEED + 1)))
    cluster.agent.start()
    assert logged(LEFT)
    assert_right(cluster)


def test_another_program_meanwhile(cluster: Cluster, logged: Callable[[str], bool]) -> None:
    """Entries that somebody removed or changed by hand meanwhile are named and put back."""
    serve(cluster)
    cluster.agent.stop()
    services, slots = cluster.maps["services"], cluster.maps["slots"]
    gone = next(frontend for frontend, _ in services.items() if str(frontend.address) == VIP)
    slot = services.get(gone).cluster.base
    services.delete([gone])
    slots.write([(slot, slots.get(slot)._replace(port=9))])
    cluster.agent.start()
    assert logged(LEFT)
    wait_until("both are named", lambda: logged(str(gone)) and logged("map slots"))
    wait_until("both are put back", lambda: logged("the maps are as planned again"))
    assert_right(cluster)


@pytest.mark.parametrize(
    "rules",
    [
        "flush ruleset",
        "delete table inet ebpflb",
        "flush map inet ebpflb backends4",
        "add table inet other",
    ],
)
def test_other_rules_meanwhile(cluster: Cluster, logged: Callable[[str], bool], rules: str) -> None:
    """Whatever happened to nft's rules, the table is whole as soon as the agent serves."""
    serve(cluster)
    cluster.agent.stop()
    nft(cluster, rules)
    cluster.agent.start()
    assert logged(LEFT)
    assert_right(cluster)


def test_another_engine(cluster: Cluster, logged: Callable[[str], bool]) -> None:
    """The other engine, and the first one again, serve what was left."""
    serve(cluster)
    usual = cluster.agent.options
    for engine in (Engine.FLOWS, Engine.NETFILTER):
        cluster.agent.stop()
        cluster.agent.options = (*usual, f"--packet-path={engine}")
        cluster.agent.start()
        assert logged(LEFT)
        assert_right(cluster)
    cluster.agent.stop()
    cluster.agent.options = usual
    cluster.agent.start()


@pytest.mark.extended
def test_ends_at_any_time(cluster: Cluster) -> None:
    """Agents are stopped or killed at any time of a start or later, under changes; whatever each of
    them leaves, the one that may run to its end has maps as a fresh list says.
    """
    chance = Random(SEED)
    serve(cluster)
    for _ in range(ROUNDS):
        for _ in range(chance.randrange(1, 4)):
            cluster.write(web(*map(endpoint, cluster.web)), others(chance))
            end_within(cluster, chance.uniform(0, LONGEST), chance)
        cluster.write(web(*map(endpoint, cluster.web)), others(chance))
        cluster.agent.start()
        wait_until("all is in force", cluster.in_force)
        assert_right(cluster)


def end_within(cluster: Cluster, seconds: float, chance: Random) -> None:
    """End the agent, and start another one that is ended after some time."""
    kinds = (signal.SIGTERM, signal.SIGKILL)
    cluster.agent.stop(chance.choice(kinds))
    cluster.agent.begin()
    time.sleep(seconds)
    cluster.agent.stop(chance.choice(kinds))
