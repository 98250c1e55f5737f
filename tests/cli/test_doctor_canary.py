# SPDX-License-Identifier: Apache-2.0
"""`ebpflb doctor`'s own connections: each path is tried, each fault named, and nothing stays."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from ebpflb.kernel import bpf
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from ebpflb.plan.canary import is_canary
from ebpflb.serve import status
from tests.cli.doctors import canaries, left, ok, on_node, published
from tests.kit import answers, forked
from tests.kit.cluster import Cluster

DROP = "table inet canary_test { chain f { type filter hook forward priority 0; policy drop; }; }"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster whose agent only reports differences."""
    with published(tmp_path_factory.mktemp("cluster"), "--audit=report") as made:
        yield made


def in_maps(cluster: Cluster) -> bool:
    return any(is_canary(name) for _, name in cluster.maps["service_names"].items())


@contextmanager
def nothing_forwarded(cluster: Cluster) -> Iterator[None]:
    cluster.node.nft(DROP)
    try:
        yield
    finally:
        cluster.node.nft("delete table inet canary_test")


@contextmanager
def at_work(cluster: Cluster) -> Iterator[tuple[forked.Forked, Any]]:
    """Return a doctor whose connections are under way: they take long because nothing is
    forwarded.
    """
    where = [*cluster.agent.where, "--cgroup-root", str(cluster.node.cgroup), "-o", "json"]
    with nothing_forwarded(cluster), TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        started = forked.start(
            ["doctor", *where],
            netns=cluster.node.netns,
            cgroup=cluster.node.cgroup,
            env=os.environ,
            stdout=out,
            stderr=err,
        )
        try:
            wait_until("the canary is there", lambda: in_maps(cluster))
            yield started, (out, err)
        finally:
            started.kill()
            started.wait()


def test_each_path(cluster: Cluster) -> None:
    """Sockets, packets and NodePorts of both families work, without a trace in the counters; then
    nothing is left.
    """
    before = status.read(cluster.agent.paths)
    found = canaries(cluster)
    assert ok(found) == ["sockets", "packets", "NodePorts", "uplinks"], found
    for path in ("sockets", "packets", "NodePorts"):
        assert {"[", "."} <= set(found[f"canary: {path}"]["detail"])
    wait_until("all is gone", lambda: left(cluster) == [])
    after = status.read(cluster.agent.paths)
    assert before and after
    same = ("service_ports", "backends", "drift", "in_sync", "not_programmed", "sync_error")
    assert [getattr(after, it) for it in same] == [getattr(before, it) for it in same]
    done = forked.run("history", *cluster.agent.where, "-o", "wide", netns=cluster.node.netns)
    assert "the canary" in done.stdout


@pytest.mark.parametrize("hook", ["connect4", "sendmsg6"])
def test_a_hook_is_detached(cluster: Cluster, hook: str) -> None:
    """Only the path of the detached hook is wrong, with the failed attempts; the other paths are
    ok.
    """
    pin = StateDir(cluster.agent.paths.state).links_directory / hook
    fd = bpf.get(str(pin))
    assert fd is not None
    bpf.link_detach(fd)
    os.close(fd)
    try:
        found = canaries(cluster)
    finally:
        cluster.agent.stop()
        cluster.agent.start()
    assert ok(found) == ["packets", "NodePorts", "uplinks"], found
    wrong = found["canary: sockets"]
    tried = {"connect4": "TCP to 192.0.0.8:9", "sendmsg6": "UDP to [100::eb]:9"}[hook]
    assert wrong["required"] and wrong["detail"].startswith(tried), wrong
    assert "audit" in wrong["remedy"]


@pytest.mark.extended
def test_programs_taken_off_its_device(cluster: Cluster) -> None:
    """Packets are wrong; sockets need no device.

    Doctor is run again if it was faster than the removal of the programs.
    """
    ended = threading.Event()

    def take_off() -> None:
        pins = StateDir(cluster.agent.paths.state).devices_directory
        names = on_node(cluster, "ls", "/sys/class/net").out.split()
        while not ended.is_set():
            for line in on_node(cluster, "ip", "-o", "link").out.splitlines():
                number, name = line.split(":")[:2]
                if name.split("@")[0].strip() in names:
                    continue
                on_node(cluster, "tc", "qdisc", "del", "dev", name.split("@")[0].strip(), "clsact")
                for pin in pins.glob(f"{number}-*"):
                    with suppress(OSError):
                        fd = bpf.get(str(pin))
                        if fd is not None:
                            bpf.link_detach(fd)
                            os.close(fd)

    thread = threading.Thread(target=take_off)
    thread.start()
    try:
        asked = (canaries(cluster) for _ in range(20))
        found = next((it for it in asked if not it["canary: packets"]["ok"]), None)
    finally:
        ended.set()
        thread.join()
    assert found
    assert "sockets" in ok(found)
    assert found["canary: packets"]["required"]


def test_nothing_is_forwarded(cluster: Cluster) -> None:
    """The result is a warning about the node, not a fault of services."""
    with nothing_forwarded(cluster):
        found = canaries(cluster)
    assert ok(found) == ["sockets", "uplinks"]
    for path in ("packets", "NodePorts"):
        warning = found[f"canary: {path}"]
        assert not warning["required"]
        assert warning["detail"].startswith("not tried: TCP to 192.0.0.249")
        assert "FORWARD" in warning["remedy"]


def test_the_agent_is_killed_meanwhile(cluster: Cluster) -> None:
    """The next agent removes the canary; doctor says that no agent runs, or that the canary was
    withdrawn.
    """
    with at_work(cluster) as (started, (out, err)):
        cluster.agent.stop(signal.SIGKILL)
        assert in_maps(cluster)
        cluster.agent.start()
        assert not in_maps(cluster)
        assert started.wait(120) in (0, 1)
        out.seek(0)
        err.seek(0)
        assert err.read() == ""
        said = {it["feature"]: it["detail"] for it in answers.results(out.read())}
    assert said["canary"].startswith("not tried: ")
    wait_until("all is gone", lambda: left(cluster) == [])


# `ebpflb doctor`'s own connections with other options of the agent.


def test_results_are_the_same_with_conntrack(tmp_path: Path) -> None:
    """The results are the same if conntrack keeps the flows."""
    with published(tmp_path, engine=Engine.NETFILTER) as cluster:
        assert ok(canaries(cluster)) == ["sockets", "packets", "NodePorts", "uplinks"]
        wait_until("all is gone", lambda: left(cluster) == [])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--shadow", "the agent runs with --shadow"),
        ("--namespaces=default", "the agent serves some Services only"),
        ("--devices=eth*", "--devices=eth* leaves out doctor's own device"),
    ],
)
def test_not_tried(tmp_path: Path, option: str, said: str) -> None:
    """A warning says so if an option of the agent leaves nothing to try."""
    with published(tmp_path, option) as cluster:
        found = canaries(cluster)
    warning = found.get("canary") or found["canary: packets"]
    assert not warning["required"] and warning["detail"].startswith(f"not tried: {said}"), found
