# SPDX-License-Identifier: Apache-2.0
"""A running agent notices, names and restores every part of the data plane that another program
removes.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links, tcx
from ebpflb.kernel.maps import layout, state_dir
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.agents import wait_until
from ebpflb.options import Paths
from ebpflb.serve import status
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web
from tests.kit.lab_cluster import new_lab
from tests.kit.sockets import Sockets

READY = 10247, "/readyz"


@pytest.fixture(scope="module")
def bpffs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a bpffs for these tests, which may be unmounted."""
    folder = tmp_path_factory.mktemp("bpffs")
    mount(folder)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=False)


def mount(folder: Path) -> None:
    subprocess.run(["mount", "-t", "bpf", "bpf", str(folder)], check=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, bpffs: Path) -> Iterator[Cluster]:
    """Yield a cluster whose agent compares five times a second, and pins in ``bpffs``."""
    folder = tmp_path_factory.mktemp("cluster")
    with new_lab() as lab:
        made = Cluster(lab, folder, "--iptables-sync-period=200ms")
        made.agent.paths = Paths(bpffs / "state", made.agent.paths.run)
        try:
            made.start()
            made.publish(web(*map(endpoint, made.web)))
            yield made
        finally:
            made.close()


@pytest.fixture(autouse=True)
def ready(cluster: Cluster) -> None:
    """Wait until everything is well before each test; log lines count from here on."""
    wait_until("it is ready", lambda: is_ready(cluster))
    cluster.logged_before = len(cluster.agent.log())  # type: ignore[attr-defined]


def said(cluster: Cluster) -> str:
    return cluster.agent.log()[cluster.logged_before :]  # type: ignore[attr-defined]


@pytest.fixture
def state(cluster: Cluster) -> StateDir:
    return StateDir(cluster.agent.paths.state)


def is_ready(cluster: Cluster) -> bool:
    return cluster.http_get(*READY)[0] == 200


def not_ready_for(cluster: Cluster, reason: str) -> bool:
    code, body = cluster.http_get(*READY)
    return code == 503 and reason in json.dumps(json.loads(body)["reasons"])


def link_ids(state: StateDir) -> dict[str, int]:
    found = {}
    for pin in state.links():
        fd = bpf.get(str(pin))
        assert fd is not None
        found[pin.name] = int(bpf.info(fd, "link_info").id)
        os.close(fd)
    return found


def detach(pin: Path) -> None:
    """Detach as `bpftool link detach` does: the pin stays."""
    fd = bpf.get(str(pin))
    assert fd is not None
    bpf.link_detach(fd)
    os.close(fd)


def lands(cluster: Cluster) -> bool:
    pod: Sockets = cluster.sockets(cluster.client)
    return len(requests.backends(pod, VIP)) == 3


def names_nothing(cluster: Cluster) -> bool:
    published = status.read(cluster.agent.paths)
    return bool(published and not published.drift and not published.audit_errors)


def put_back(cluster: Cluster, named: str) -> None:
    """Wait until the log names the part, since the test began, and the part is restored."""
    wait_until(f"{named} is said", lambda: named in said(cluster))
    wait_until("it is ready", lambda: is_ready(cluster))
    wait_until("its status names nothing", lambda: names_nothing(cluster))
    assert lands(cluster)


@pytest.mark.parametrize("hook", cgroup_links.CGROUP_HOOKS)
def test_a_detached_hook_is_attached_again(cluster: Cluster, state: StateDir, hook: str) -> None:
    """A detached link keeps its pin, but serves nothing: the next comparison finds this."""
    before = cgroup_links.attached(state)
    detach(state.links_directory / hook)
    wait_until("it is attached", lambda: cgroup_links.attached(state) == before)
    put_back(cluster, f"hook {hook} is not attached")


def test_removed_pins_cost_nothing(cluster: Cluster, state: StateDir) -> None:
    """The agent holds the links, and pins the same links again.

    A pin that is removed between comparison and repair is pinned again without being named.
    """
    before = link_ids(state)
    for pin in list(state.links()):
        pin.unlink()
    wait_until("they are pinned", lambda: link_ids(state) == before)
    put_back(cluster, " has no pin")


@pytest.mark.parametrize("name", layout.MAPS)
def test_an_unpinned_map_is_pinned_again(cluster: Cluster, state: StateDir, name: str) -> None:
    """The pinned map is the same, with all its entries."""
    pin = next(state.directory.glob(f"*/{name}"))
    number = map_id(pin)
    pin.unlink()
    wait_until("it is pinned", lambda: pin.exists() and map_id(pin) == number)
    put_back(cluster, f"map {name} has no pin")


def test_an_unknown_pin_is_replaced(cluster: Cluster, state: StateDir, bpffs: Path) -> None:
    """Another map under the name of ours is replaced, because the next agent would adopt it.

    The pin is replaced by a rename, so that the agent never sees it missing.
    """
    pin, other = (next(state.directory.glob(f"*/{name}")) for name in ("secret", "verdicts"))
    number = map_id(pin)
    fd = bpf.get(str(other))
    assert fd is not None
    bpf.pin(fd, str(bpffs / "other"))
    os.close(fd)
    (bpffs / "other").replace(pin)
    wait_until("ours is pinned", lambda: pin.exists() and map_id(pin) == number)
    put_back(cluster, "map secret is not the one that is pinned")


def map_id(pin: Path) -> int:
    fd = bpf.get(str(pin))
    if fd is None:
        return 0
    try:
        return int(bpf.info(fd, "map_info").id)
    finally:
        os.close(fd)


def test_detached_from_a_device(cluster: Cluster, state: StateDir) -> None:
    """The link is detached at one hook of one device without an event, and its pin stays; without
    tcx, the filters are removed.
    """
    before = sorted(path.name for path in state.devices_directory.iterdir())
    if tcx.works():
        detach(state.devices_directory / before[0])
        put_back(cluster, f"has no program of the agent at {before[0].partition('-')[2]}")
    else:
        enter = cluster.node.enter
        subprocess.run([*enter, "tc", "qdisc", "del", "dev", "eth0", "clsact"], check=True)
        put_back(cluster, "device eth0 has no program of the agent at ingress")
        shown = subprocess.run(
            [*enter, "tc", "qdisc", "show", "dev", "eth0"], check=True, capture_output=True
        )
        assert b"clsact" in shown.stdout

    def is_pinned() -> bool:
        return sorted(path.name for path in state.devices_directory.iterdir()) == before

    wait_until("all is pinned", is_pinned)


def test_the_bpffs_goes_and_another_comes(cluster: Cluster, state: StateDir, bpffs: Path) -> None:
    """No connection fails; /readyz says what is missing, until everything is pinned again."""
    before = link_ids(state)
    client = cluster.start_client(cluster.client, "tcp", VIP, pause=0.005)
    subprocess.run(["umount", "--lazy", str(bpffs)], check=True)
    wait_until("it is not ready", lambda: not_ready_for(cluster, "not in a bpffs"))
    verdict, causes = judged(cluster)
    assert verdict == "DEGRADED"
    assert {"no socket hooks", "audit errors"} <= causes
    mount(bpffs)
    wait_until("all is pinned", lambda: state.links_directory.is_dir() and is_ready(cluster))
    assert link_ids(state) == before
    assert not cluster.stop_client(client)["errors"]
    put_back(cluster, "hook connect4 has no pin")
    lock = f"lock of {state.directory} is not held any more"
    wait_until("the lock is said too", lambda: lock in said(cluster))


def judged(cluster: Cluster) -> tuple[str, set[str]]:
    """Return the verdict of `ebpflb status`, and the causes of its reasons."""
    said = cluster.ebpflb("status", "-o", "json")
    found = json.loads(said.stdout)
    return found["verdict"], {reason["cause"] for reason in found["reasons"]}


def test_an_agent_that_ends_without_its_bpffs_says_that_nothing_serves(
    cluster: Cluster, bpffs: Path
) -> None:
    """The programs end with the agent; the next agent serves again once a bpffs is there."""
    subprocess.run(["umount", "--lazy", str(bpffs)], check=True)
    cluster.agent.stop()
    assert "nothing serves until an agent starts" in said(cluster)
    assert "the loaded programs and maps keep serving" not in said(cluster)
    asked = cluster.ebpflb("status")
    assert asked.returncode == 1 and "bpffs" in asked.stderr
    mount(bpffs)
    cluster.close_maps()
    cluster.agent.start()
    assert requests.tcp(cluster.sockets(cluster.client), VIP).name.startswith("web-")


def test_no_other_agent_gets_a_bpffs_that_came(cluster: Cluster, bpffs: Path) -> None:
    """The lock and the record of the run directory are also in the new bpffs."""
    subprocess.run(["umount", "--lazy", str(bpffs)], check=True)
    mount(bpffs)
    paths = cluster.agent.paths
    wait_until("the record is there", lambda: state_dir.read_record(paths.state) == paths)
    with pytest.raises(NodeError, match="already serves"), status.held(elsewhere(paths)):
        pass
    put_back(cluster, str(bpffs))  # its lock; or its pins, where a look was past the lock already


def elsewhere(paths: Paths) -> Paths:
    """Return the options of an agent with another run directory."""
    return Paths(paths.state, paths.run.with_name("other-run"))


@pytest.mark.extended
def test_not_ready_while_another_answers_on_10256(tmp_path: Path) -> None:
    """Readiness is the agent's own, even beside a kube-proxy that has port 10256 and answers
    200.
    """
    with running(tmp_path) as made:
        made.publish(web(*map(endpoint, made.web)))
        wait_until("it is ready", lambda: is_ready(made))
        made.agent.stop()
        assert made.http_get(*READY)[0] == 0
        taken = [*made.node.enter, "python3", "-m", "http.server", "10256"]
        other = subprocess.Popen(taken, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until("it answers", lambda: made.http_get(10256, "/")[0] == 200)
            made.agent.start()
            wait_until("it is ready", lambda: is_ready(made))
            assert made.http_get(10256, "/readyz")[0] == 404
        finally:
            other.terminate()
            other.wait()
