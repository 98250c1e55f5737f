# SPDX-License-Identifier: Apache-2.0
"""`ebpflb doctor` prints a line for each problem, and has an exit status."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.agents import wait_until
from ebpflb.serve import status
from tests.cli.doctors import doctor, on_node
from tests.kit import answers
from tests.kit.cluster import NODEPORT, Cluster, endpoint, running, web


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster whose agent only reports differences, and is in sync."""
    with running(tmp_path_factory.mktemp("cluster"), "--audit=report") as made:
        made.publish(web(*map(endpoint, made.web), nodeport=NODEPORT))
        wait_until("it is published", lambda: _backends(made) == 6)
        yield made


def _backends(cluster: Cluster) -> int:
    found = status.read(cluster.agent.paths)
    return found.backends if found else 0


def not_ok(cluster: Cluster) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit status, and errors and warnings by feature."""
    done = doctor(cluster, "-o", "json")
    assert done.err == ""
    return done.status, {it["feature"]: it for it in answers.results(done.out) if not it["ok"]}


def test_every_line_of_a_healthy_node_is_ok(cluster: Cluster) -> None:
    """Every line is ok, and the steps are in order."""
    done = doctor(cluster)
    lines = done.out.split("\n\n")[0].splitlines()
    assert (done.status, done.err) == (0, "")
    assert {line.split()[0] for line in lines[1:]} <= {"ok", "warning"}
    assert done.out.splitlines()[-1].startswith("wrong: 0, warnings: ")
    fine = "\n".join(line for line in lines if line.startswith("ok"))
    order = [fine.index(f" {word} ") for word in ("bpffs", "status", "map services")]
    for name in ("slots", "choices", "tcp_flows", "other_flows"):
        assert f"  map {name} " in done.out
    assert order == sorted(order) and any("canary: NodePorts" in line for line in lines)


def test_wrong_settings_are_reported(cluster: Cluster) -> None:
    """Missing forwarding is an error; a local NodePort and strict rp_filter are warnings."""
    changed = {
        "net.ipv4.ip_forward": "0",
        "net.ipv4.ip_local_port_range": "30000 32767",
        "net.ipv4.conf.all.rp_filter": "1",
    }
    before = {name: on_node(cluster, "sysctl", "-n", name).out.strip() for name in changed}
    try:
        for name, value in changed.items():
            assert on_node(cluster, "sysctl", "-w", f"{name}={value}").status == 0
        code, found = not_ok(cluster)
    finally:
        for name, value in before.items():
            on_node(cluster, "sysctl", "-w", f"{name}={value}")
    assert code == 1
    assert found["forwarding of IPv4"]["required"]
    assert str(NODEPORT) in found["local ports"]["remedy"]
    assert "strict on" in found["rp_filter"]["detail"]


def test_a_container_does_not_see_the_nodes_processes(cluster: Cluster) -> None:
    """In a container the processes' cgroups are unknown, and no line calls them ok."""
    container = [*cluster.node.enter, "unshare", "--pid", "--fork", "--mount-proc", sys.executable]
    words = ["-m", "ebpflb", "doctor", *cluster.agent.where, "--no-canary", "-o", "json"]
    done = subprocess.run([*container, *words], capture_output=True, text=True, check=False)
    (row,) = [it for it in answers.results(done.stdout) if it["feature"] == "processes"]
    assert not row["ok"] and row["detail"].startswith("unknown: "), row


def test_an_endpoint_without_a_route(cluster: Cluster) -> None:
    """The endpoint is named, with the kernel's reason."""
    address = cluster.web[0].v4
    on_node(cluster, "ip", "route", "add", "unreachable", f"{address}/32")
    try:
        _, found = not_ok(cluster)
    finally:
        on_node(cluster, "ip", "route", "del", "unreachable", f"{address}/32")
    assert f"{address} (" in found["routes"]["detail"]
    assert "no route to 1 of" in found["routes"]["detail"]
    assert "routes" not in not_ok(cluster)[1]


def test_an_own_program_without_its_pin(cluster: Cluster) -> None:
    """A program of ours without its pin is not listed among other programs; the pin is named, and
    so is who pins it again.
    """
    state = StateDir(cluster.agent.paths.state)
    programs = cgroup_links.attached(state)
    (state.links_directory / "sendmsg4").unlink()
    try:
        _, found = not_ok(cluster)
    finally:
        cluster.agent.stop()
        cluster.agent.start()
    assert found["audit: pin"]["detail"].startswith("hook sendmsg4 has no pin ")
    assert found["audit: pin"]["remedy"].startswith("the agent only reports it (--audit=report)")
    others = found.get("other programs at the hooks", {"detail": ""})["detail"]
    assert f"#{programs['sendmsg4']}" not in others


def test_a_deleted_entry_is_named(cluster: Cluster) -> None:
    """The agent compares at once, and names an entry that someone has deleted."""
    maps = StateDir(cluster.agent.paths.state).open_maps()
    key = next(key for key, _ in maps["cluster_ips"].items())
    try:
        maps["cluster_ips"].delete([key])
        code, found = not_ok(cluster)
    finally:
        maps["cluster_ips"].write([(key, 1)])
        for opened in maps.values():
            opened.close()
    assert code == 1
    assert str(key) in found["audit: map"]["detail"]


def test_an_agent_that_hangs_is_unknown(cluster: Cluster) -> None:
    """Nothing is reported as ok without a comparison."""
    published = status.read(cluster.agent.paths)
    assert published
    os.kill(published.pid, signal.SIGSTOP)
    try:
        code, found = not_ok(cluster)
    finally:
        os.kill(published.pid, signal.SIGCONT)
    assert code == 1
    assert found["audit"]["detail"].startswith("unknown: ")
    assert found["status: agent does not answer"]["required"]


def test_a_missing_pin_of_a_map_is_one_line(cluster: Cluster) -> None:
    """The missing pin is named, and checks that need the maps are left out."""
    pin = StateDir(cluster.agent.paths.state).persistent_directory / "slots"
    kept = pin.with_name("slots_kept")
    pin.rename(kept)
    try:
        _, found = not_ok(cluster)
    finally:
        kept.rename(pin)
    rows = {name for name, it in found.items() if str(pin) in it["detail"] + it["remedy"]}
    assert rows - {"status: drift"} == {"maps"} and found["maps"]["required"]  # the agent's own


def test_no_agent(cluster: Cluster) -> None:
    """The programs keep serving; lines say that changes are not applied, what is not compared, and
    which links, programs and pins are missing.
    """
    cluster.agent.stop()
    pin = StateDir(cluster.agent.paths.state).links_directory / "sendmsg4"
    try:
        code, found = not_ok(cluster)
        text = doctor(cluster).out
        pin.unlink()
        lacking = not_ok(cluster)[1]["status: drift"]["remedy"]
        alone = doctor(cluster, "--no-canary", "--no-headers").out.splitlines()
        quiet = doctor(cluster, "--no-canary", "--no-headers", "--quiet").out.splitlines()
    finally:
        cluster.agent.start()
    assert code == 1
    words = [line.split()[0] for line in alone]
    assert words == sorted(words, key=["WRONG", "warning", "ok"].index) and "ok" in words
    assert {line.split()[0] for line in quiet} == {*words} - {"ok"}
    assert found["status: no agent runs"]["detail"] == "DEGRADED"
    assert found["audit"]["detail"].startswith("unknown: ") and "status: drift" not in found
    assert lacking.startswith(f"hook sendmsg4 has no pin {pin}")
    assert re.search(r"(?m)^WRONG +status: no agent runs ", text) and "docs/runbook.md" in text
