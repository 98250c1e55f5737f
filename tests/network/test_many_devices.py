# SPDX-License-Identifier: Apache-2.0
"""A first start on a node with many devices: programs are attached beside the agent's work.

The kernel takes some 10 ms and more for the first programs of a device with tcx, because it waits
for all CPUs; an agent that attaches clsact filters has nothing to do beside.
"""

import os
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest

from ebpflb.kernel.attach import tcx
from ebpflb.kernel.attach.cgroup_links import CGROUP_HOOKS
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.attach.tcx import Tcx
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node.namespaces import call_in
from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import NETNS
from ebpflb.serve import status
from ebpflb.serve.status import AgentStatus
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web
from tests.kit.sockets import Sockets
from tests.load import scaled

pytestmark = pytest.mark.skipif(
    os.cpu_count() == 1 or not tcx.works(), reason="here programs are attached at once"
)

MANY = scaled(100)


class ManyDevices:
    """A node on which no agent has run, with many more devices."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.agent, self.node = cluster, cluster.agent, cluster.node
        self.attached = Tcx(StateDir(self.agent.paths.state).devices_directory)
        self.names = [f"many{number}" for number in range(MANY)]
        self.node.ip(*(f"link add {name} type bridge" for name in self.names))

    def begin(self) -> None:
        """The agent's first start; returns when the node is served, but not all devices are."""
        self.agent.begin()
        wait_until("the node is served", lambda: self.status.attached and self.status.in_sync)
        assert self.to_come

    @property
    def status(self) -> AgentStatus:
        return status.read(self.agent.paths) or status.initial(node="", source="")

    @property
    def to_come(self) -> int:
        return self.status.devices_to_come

    def healthz(self) -> int:
        """The status of the answer; 0 if there is none yet."""
        return call_in(NETNS / self.node.netns, _healthz)

    def remove(self, names: Sequence[str]) -> None:
        self.node.ip(*(f"link del {name}" for name in names))

    def indexes(self) -> dict[str, int]:
        """The devices that are to have programs; loopback is none."""
        found = call_in(NETNS / self.node.netns, socket.if_nameindex)
        return {name: index for index, name in found if name != "lo"}

    def have_programs(self, indexes: Collection[int]) -> set[int]:
        """Those of the devices that have programs; while others get them the kernel takes long."""
        found = partial(self.attached.probably_attached, indexes)
        return call_in(NETNS / self.node.netns, found)

    def links(self) -> int:
        """How many links the agent has open."""
        assert self.agent.process
        opened = Path(f"/proc/{self.agent.process.pid}/fd")
        return sum(os.readlink(each) == "anon_inode:bpf-link" for each in opened.iterdir())

    def wait_for_the_last(self) -> None:
        """Returns when exactly the devices that exist have programs, pins and open links."""
        wait_until("all devices have programs", lambda: self.status.attached and not self.to_come)
        existing = set(self.indexes().values())
        wait_until("only these have pins", lambda: self.attached.recorded() == existing)
        assert self.have_programs(existing) == existing
        links = 2 * len(existing) + len(CGROUP_HOOKS)
        wait_until("only their links are open", lambda: self.links() == links)
        assert not self.status.devices_not_served


def _healthz() -> int:
    try:
        with closing(HTTPConnection("127.0.0.1", 10256, timeout=5)) as connection:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
    except ConnectionRefusedError:
        return 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One for each test."""
    with running(tmp_path) as made:
        made.publish(web(endpoint(made.web[0])))
        yield made


@pytest.fixture
def many(cluster: Cluster) -> ManyDevices:
    cluster.agent.stop()
    cluster.close_maps()
    unpin_all(StateDir(cluster.agent.paths.state))
    return ManyDevices(cluster)


def test_a_change_is_live_meanwhile(many: ManyDevices, pod: Sockets) -> None:
    """An endpoint that is replaced is served while most devices still wait for their programs."""
    many.begin()
    many.cluster.publish(web(endpoint(many.cluster.web[1])))
    assert requests.backends(pod, VIP).keys() == {"web-2"}
    assert many.to_come
    many.wait_for_the_last()


def test_healthz_waits_for_all_devices(many: ManyDevices) -> None:
    """A load balancer sends nothing here while the flow tables open no flow."""
    many.agent.begin()
    wait_until("/healthz is 200", lambda: many.healthz() == 200)
    existing = set(many.indexes().values())
    assert many.have_programs(existing) == existing


def test_a_new_pod_does_not_wait_for_the_others(many: ManyDevices) -> None:
    """The device of a pod that comes meanwhile gets programs before those that were there."""
    many.begin()
    many.node.ip("link add late type veth peer name late-peer")
    index = many.indexes()["late"]
    wait_until("the new pod has programs", lambda: bool(many.have_programs({index})))
    assert many.to_come
    many.wait_for_the_last()
