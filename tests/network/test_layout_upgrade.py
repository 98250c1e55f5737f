# SPDX-License-Identifier: Apache-2.0
"""Upgrade to a build whose maps have another layout, and back, under load."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ebpflb
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab import manifests
from ebpflb.lab.manifests import Manifest
from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.two_nodes import Frontends, TwoNodes

Environment = list[str]  # env(1) and its words

# In a struct of maps that an upgrade keeps if it can, and in one of maps that it makes again.
NEW_FIELDS = {"layout/socket.h": "socket_entry", "layout/node.h": "device"}
FIRST, SECOND = Frontends(10), Frontends(20)
OTHER_MAPS = "were made by another version of ebpflb: use that version's `ebpflb`"
IDLE = 500  # Services that no one asks: their plans make the upgrade longer


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoNodes]:
    """Publish Service "first" with the endpoint on the near node, and "second" with the one on the
    far node; a new agent would number their backends in the other order.
    """
    folder = tmp_path / "nodes"
    with two_nodes.running(folder, *two_nodes.CLUSTER_CIDR, engine=Engine.NETFILTER) as made:
        made.publish(made.service("second", 20, made.there))
        services = made.service("second", 20, made.there), made.service("first", 10, made.here)
        made.publish(*services, *map(idle_service, range(IDLE)))
        yield made


def idle_service(number: int) -> list[Manifest]:
    """Return a Service that is written after the two others."""
    name, port = f"z{number:03}", [{"port": 80}]
    endpoint = manifests.endpoint(f"10.200.0.{number % 250 + 1}", node="elsewhere", target=name)
    return [
        manifests.service(name, [f"10.96.{1 + number // 250}.{number % 250 + 1}"], port),
        manifests.endpoint_slice(name, "IPv4", [endpoint], port),
    ]


@pytest.fixture
def other_build(tmp_path: Path) -> Path:
    """Return the PYTHONPATH of this build with NEW_FIELDS."""
    shutil.copytree(Path(ebpflb.__file__).parent, tmp_path / "other/ebpflb")
    sources = Path(shutil.copytree(layout.SOURCES, tmp_path / "other/bpf"))
    for header, struct in NEW_FIELDS.items():
        begin = f"struct {struct} {{\n"
        text = (sources / header).read_text()
        assert begin in text
        (sources / header).write_text(text.replace(begin, f"{begin}\t__u32 pad_new[2];\n"))
    _forget_sizes(sources / "layout.h")
    assert layout.layout_hash(sources) != layout.layout_hash()
    assert layout.persistent_hash(sources) != layout.persistent_hash()
    return tmp_path / "other"


def _forget_sizes(header: Path) -> None:
    """Remove the checks of sizes, which differ in the other build."""
    text, count = re.subn(
        r"(?<=\bSIZE\(type, bytes\)) .*", " extern int ignored", header.read_text()
    )
    assert count == 1
    header.write_text(text)


def ways(two: TwoNodes) -> Iterator[tuple[str, str, tuple[str, int]]]:
    """Yield each client, the name of the expected backend, and the address and port to ask."""
    for who, kind in (("outside", "nodeport"), ("unhooked", "cluster"), ("hooked", "cluster")):
        for name, frontends in (("here", FIRST), ("there", SECOND)):
            for v6 in (False, True):
                yield who, name, frontends.to(kind, two.near, v6=v6)


def dropped(two: TwoNodes) -> int:
    """Return the packets whose choice had no endpoint, since the near node's agent was started."""
    command = [*two.near.enter, "nft", "list", "chain", "inet", "ebpflb", "translate"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (count,) = re.findall(r"counter packets (\d+) .*the endpoint was removed", text)
    return int(count)


def ask(two: TwoNodes, environment: Environment, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of a build on the near node, about its agent."""
    agent = two.agents[0]
    command = [*two.near.enter, *environment, sys.executable, "-P", "-m", "ebpflb", *words]
    where = f"--state-dir={agent.paths.state}"
    return subprocess.run([*command, where], capture_output=True, text=True, check=False)


def ask_another_build(two: TwoNodes, command: Environment) -> None:
    """`status` and `services` get the agent's answers; other commands name the command of the right
    build.
    """
    status, services = ask(two, command, "status"), ask(two, command, "services", "list")
    assert (status.returncode, services.returncode) == (0, 0)
    assert "OK: " in status.stdout
    assert OTHER_MAPS in " ".join(status.stdout.split())
    assert "default/second" in services.stdout
    dumped = ask(two, command, "maps", "dump", "services")
    assert (dumped.returncode, dumped.stdout) == (1, "")
    assert OTHER_MAPS in dumped.stderr


def test_no_connection_is_lost_or_led_astray(two: TwoNodes, other_build: Path) -> None:
    """On netfilter established connections continue, and each new connection reaches its own
    Service at once, also between the new agent's first writes and its programs. Commands of the
    other build report what they can know.
    """
    asked = list(ways(two))
    established = [two.connected(who, to) for who, _, to in asked]
    pressing = [
        two.start_client(getattr(two, who), "tcp", *to, pause=0.003) for who, _, to in asked
    ]
    builds: list[Environment] = [["env", f"PYTHONPATH={other_build}"], []]
    for own, is_known, another in zip(builds, (False, True), reversed(builds), strict=True):
        for agent in two.agents:
            agent.stop()
            agent.under = own
            agent.start()
            assert StateDir(agent.paths.state).exists() == is_known
        ask_another_build(two, another)
        assert dropped(two) == 0
        assert all(map(requests.lives, established))
    counts = [two.stop_client(client) for client in pressing]
    assert [count["errors"] for count in counts] == [{}] * len(counts)
    assert [list(count["names"]) for count in counts] == [[name] for _, name, _ in asked]
    two.agents[0].stop()
    assert ask(two, builds[0], "cleanup").returncode == 0
    assert not two.agents[0].paths.state.exists()
