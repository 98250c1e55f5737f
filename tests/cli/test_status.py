# SPDX-License-Identifier: Apache-2.0
"""`ebpflb status`, and `ebpflb cleanup` at the end."""

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyroute2 import netns

from ebpflb.errors import NodeError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links, tcx
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import kube_proxy, sysctls
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Process
from ebpflb.model.kube_proxy import Detection
from ebpflb.serve import status
from ebpflb.version import VERSION
from tests.cli.conftest import Ebpflb
from tests.kernel.node import answering
from tests.kit import answers
from tests.kit.cluster import Cluster, endpoint, web

PROGRAMMED = 5  # two ports, two families, and the marker


@pytest.fixture(autouse=True)
def well(cluster: Cluster) -> None:
    """Return when the agent has published that it has no error."""
    cluster.agent.manifests.mkdir(exist_ok=True)
    if cluster.agent.process and cluster.agent.process.poll() is not None:
        cluster.agent.start()
    cluster.publish(web(*map(endpoint, cluster.web)))
    wait_until("its status is published", lambda: is_well(published(cluster)))


def is_well(found: status.AgentStatus) -> bool:
    """Whether everything is programmed, and no damage of an earlier test is left."""
    errors = found.source_errors, found.invalid_objects, found.node_unknown
    return found.service_ports == PROGRAMMED and not any(errors)


def published(cluster: Cluster) -> status.AgentStatus:
    found = status.read(cluster.agent.paths)
    assert found
    return found


def running(cluster: Cluster) -> Process:
    """Return the agent's process."""
    assert cluster.agent.process
    return cluster.agent.process


def test_exit_status_0_if_nothing_is_wrong(
    ebpflb: Ebpflb, cluster: Cluster, where: list[str]
) -> None:
    """If an agent runs, the hooks serve and nothing is wrong, the exit status on the node is 0."""
    with on_the_node(cluster):
        done = ebpflb("status", *where, "-o", "json")
        devices = [name for _, name in socket.if_nameindex() if name != "lo"]
    said = json.loads(done.out)
    assert (done.status, said["verdict"], said["reasons"]) == (0, "OK", [])
    assert said["last_received"].keys() == {"manifests"}
    assert (said["agent"], said["lists_complete"], said["programs"]) == ("runs", True, "current")
    assert (said["node"], said["pid"]) == ("node", running(cluster).pid)
    assert "connect4" in said["socket_hooks"]
    assert said["service_ports"] == PROGRAMMED
    (count,) = said["devices"].values()
    assert count == len(devices)
    assert (said["devices_not_served"], said["other_programs_first"]) == ({}, {})
    assert said["ports_not_reserved"] is None
    assert said["flows"].keys() == {"tcp_flows", "other_flows"}
    assert said["flows"]["tcp_flows"].keys() == {"swept", "entries", "evicted"}


def test_kube_proxy_is_not_to_be_seen(
    ebpflb: Ebpflb, cluster: Cluster, where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If kube-proxy cannot be detected, status says so and shows everything else."""

    def refuse() -> Detection:
        raise NodeError("/proc/net/ip_tables_names: Permission denied")

    monkeypatch.setattr(kube_proxy, "detect", refuse)
    with on_the_node(cluster):
        said = json.loads(ebpflb("status", *where, "-o", "json").out)
    assert said["kube_proxy"].startswith("cannot be checked: /proc/net/ip_tables_names")
    assert said["agent"] == "runs"


@contextmanager
def on_the_node(cluster: Cluster) -> Iterator[None]:
    """Run in the node's network namespace."""
    netns.pushns(cluster.node.netns)
    try:
        yield
    finally:
        netns.popns()


def states_of_threads(pid: int) -> set[str]:
    """Return the threads' states as in proc(5), where "T" means stopped."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}


def test_an_agent_that_is_stopped_does_not_answer(
    ebpflb: Ebpflb, cluster: Cluster, where: list[str]
) -> None:
    """The lock is held and the published status is good, but changes are not applied."""
    agent = running(cluster)
    agent.send_signal(signal.SIGSTOP)
    try:
        wait_until("it has stopped", lambda: states_of_threads(agent.pid) == {"T"})
        done = ebpflb("status", *where, "-o", "json")
    finally:
        agent.send_signal(signal.SIGCONT)
    said = json.loads(done.out)
    assert (done.status, said["verdict"]) == (3, "DEGRADED")
    assert [reason["cause"] for reason in said["reasons"]] == ["agent does not answer"]
    assert f"(pid {said['pid']})" in said["reasons"][0]["text"]
    wait_until("it answers again", lambda: ebpflb("status", *where).status == 0)


def test_programs_before_ours_are_named(ebpflb: Ebpflb, cluster: Cluster, where: list[str]) -> None:
    """Programs of other software that see packets before ours are named for each device; this is no
    error.
    """
    if not tcx.works():
        pytest.skip("this kernel has no tcx")
    code = bytes.fromhex("b7000000ffffffff9500000000000000")
    program = bpf.prog_load(
        name="other_program", program_type=3, attach_type=0, code=code, log=None
    )
    netns.pushns(cluster.node.netns)
    try:
        index = socket.if_nametoindex("eth0")
        link = bpf.link_create(program, index, tcx.TCX_HOOKS["ingress"], tcx.BEFORE)
        done = ebpflb("status", *where)
    finally:
        netns.popns()
    os.close(link)
    os.close(program)
    assert done.status == 0
    assert re.search(
        r"(?m)^  other programs first +eth0: other_program #\d+ \(ingress\)$", done.out
    )


def test_the_text_has_the_fields_of_the_json(ebpflb: Ebpflb, where: list[str]) -> None:
    """The text has the version, the verdict, then the fields of the JSON in groups, one per
    line.
    """
    done = ebpflb("status", *where)
    assert done.status == 0
    version, first, *rest = done.out.splitlines()
    assert (version, first) == (f"ebpflb {VERSION}", "OK: this node is served")
    assert [line for line in rest if line[:1].isalpha()] == [
        "agent",
        "traffic",
        "services",
        "connections",
    ]
    lines = {line[2:22].strip(): line[23:] for line in rest}
    assert re.match(r"runs, pid \d+, since 20.*\(\d+ \w+ ago\)$", lines["agent"])
    assert (lines["lists complete"], lines["service ports"]) == ("yes", "5")
    assert lines["last received"].startswith("manifests: 20")
    assert "before the agent ended" not in done.out


def told(ebpflb: Ebpflb, options: list[str]) -> list[str]:
    """Return what commands say about a kube-proxy behind programs without an agent."""
    words = "kube-proxy", "status: no agent runs"
    rows = [
        f"{row['detail']} {row['remedy']}"
        for command in ("check", "doctor --no-canary")
        for row in answers.results(ebpflb(*command.split(), *options, "-o", "json").out)
        if row["feature"] in words
    ]
    said = json.loads(ebpflb("status", *options, "-o", "json").out)
    rows += [reason["text"] for reason in said["reasons"]]
    rows.append(said["kube_proxy"] or "")
    return [row for row in rows if "no agent updates them" in row]


def test_a_dead_agent_means_degraded(
    ebpflb: Ebpflb, cluster: Cluster, where: list[str], tmp_path: Path
) -> None:
    """A dead agent means DEGRADED: the hooks keep serving, and its last status is shown
    separately. Commands say that a kube-proxy has no effect behind its programs, but not if an
    agent runs, or without a kube-proxy.
    """
    cluster.agent.stop(signal.SIGKILL)
    done = ebpflb("status", *where, "-o", "json")
    said = json.loads(done.out)
    assert (done.status, said["verdict"]) == (3, "DEGRADED")
    assert said["agent"] == "does not run"
    text = ebpflb("status", *where).out
    assert (
        "\nDEGRADED (no agent runs): no agent is running: changes of Services are not applied\n"
        in text
    )
    now, before = text.split("\nbefore the agent ended:\n")
    assert "socket hooks" in now and "service ports" not in now
    assert "service ports" in before and "socket hooks" not in before
    assert "connect4" in said["socket_hooks"]
    assert said["service_ports"] == 5

    with on_the_node(cluster):
        with answering.process(tmp_path) as pid:
            found = told(ebpflb, where)
            assert len(found) == 5
            assert all(f"is also running (pid {pid})" in row for row in found)
            assert all("the last one wrote its status at 20" in row for row in found)
            cluster.agent.start()
            assert told(ebpflb, where) == []
        cluster.agent.stop(signal.SIGKILL)
        assert told(ebpflb, where) == []


def test_an_unknown_node_name_is_said_by_status_and_check(
    ebpflb: Ebpflb, cluster: Cluster, where: list[str]
) -> None:
    """Even with complete lists /healthz answers 503 if no Node has the node's name.

    A known Node stays known after its deletion (kube-proxy.md 13.1), so the agent is a new one.
    """
    cluster.agent.stop()
    cluster.publish(*web(), manifests.node("another", "192.0.2.9"))
    cluster.agent.start()
    wait_until("it is known", lambda: bool(published(cluster).node_unknown))
    done = ebpflb("status", *where)
    assert done.status == 3
    assert done.out.splitlines()[1].startswith(
        'DEGRADED (node unknown): no Node "node" in manifests in'
    )
    assert "/healthz answers 503" in " ".join(done.out.split())
    rows = answers.results(ebpflb("check", *where, "-o", "json").out)
    (row,) = [each for each in rows if each["feature"] == "this node's Node"]
    assert not row["ok"] and "503" in row["remedy"]
    assert 'W no Node "node"' in cluster.agent.log()


def test_cleanup_beside_an_agent(ebpflb: Ebpflb, cluster: Cluster, where: list[str]) -> None:
    """Cleaning up under a running agent is refused in one line, and nothing is touched."""
    before = cgroup_links.attached(StateDir(cluster.agent.paths.state))
    done = ebpflb("cleanup", *where)
    assert f"an agent (pid {running(cluster).pid}) still serves" in done.error
    assert cgroup_links.attached(StateDir(cluster.agent.paths.state)) == before


def test_nothing_is_left_after_cleanup(ebpflb: Ebpflb, cluster: Cluster, where: list[str]) -> None:
    """Nothing of ours is left, neither at devices nor in the kernel's list of ports."""
    cluster.close_maps()
    cluster.agent.stop(signal.SIGKILL)
    netns.pushns(cluster.node.netns)
    try:
        index = socket.if_nametoindex("eth0")
        assert sysctls.RESERVED.read_text().strip() == "10000-29999"
        assert ebpflb("cleanup", *where).status == 0
        assert sysctls.RESERVED.read_text().strip() == ""
        if tcx.works():
            wait_until("the programs are off", lambda: not bpf.query(index, 46))
    finally:
        netns.popns()
    assert not cluster.agent.paths.state.exists()
    assert not cluster.agent.paths.run.exists()


def test_never_run(ebpflb: Ebpflb, bpffs: Path) -> None:
    """If no agent has ever run the verdict is DOWN, and the searched folders are named."""
    state, run = bpffs / "never", bpffs.parent / "run"
    done = ebpflb("status", "--state-dir", state, "--run-dir", run)
    assert done.status == 4
    said = " ".join(done.out.split())
    assert said.startswith(
        f"ebpflb {VERSION} DOWN (nothing is here): "
        f"no programs in {state}, and no agent's status in {run}: "
    )
    assert "does not run" in done.out
