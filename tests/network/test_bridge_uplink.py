# SPDX-License-Identifier: Apache-2.0
"""A node whose uplink is the only port of a bridge. The bridge has the programs instead of the
port, as long as no frame can bypass it and netfilter does not run at the port.
"""

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ebpflb.kernel.attach import tcx
from ebpflb.kernel.attach.device_programs import attacher
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node.namespaces import call_in
from ebpflb.lab.agents import wait_until
from ebpflb.lab.netns import NETNS
from ebpflb.model.packet_path import Engine
from tests.kit import needs, requests, two_nodes
from tests.kit.pod_networks import BridgeUplink, call_netfilter
from tests.kit.two_nodes import CLUSTER_CIDR, Frontends, TwoNodes

WEB, HERE = Frontends(10), Frontends(20)
Set = Callable[[TwoNodes, bool], None]


def sysctl(two: TwoNodes, on: bool) -> None:
    call_netfilter(two.near, calls=on)


def own_setting(two: TwoNodes, on: bool) -> None:
    two.near.ip(f"link set br0 type bridge nf_call_ip6tables {on:d}")


def second_port(two: TwoNodes, on: bool) -> None:
    if on:
        two.near.ip("link add vm type veth peer name vm0", "link set vm master br0 up")
    else:
        two.near.ip("link del vm")


CHANGES = [
    pytest.param(sysctl, marks=needs.bridge_netfilter),
    pytest.param(own_setting, marks=needs.bridge_netfilter),
    second_port,
]


def add_qdisc(two: TwoNodes) -> None:
    """Give the port the qdisc that its programs need without tcx. While a device gets its first
    qdisc, the kernel drops outgoing packets (docs/limits.md), so the test adds the qdisc before.
    """
    if not tcx.works():
        subprocess.run([*two.near.enter, "tc", "qdisc", "add", "dev", "up0", "clsact"], check=True)


@pytest.fixture(scope="module", params=Engine, ids=str)
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    how: Any = {"network": BridgeUplink(), "engine": request.param, "prepare": add_qdisc}
    how["far_agent"], options = False, (*CLUSTER_CIDR, *BridgeUplink.OPTIONS)
    with two_nodes.running(tmp_path_factory.mktemp("two"), *options, **how) as made:
        web, here = made.service("web", 10, made.here, made.there), made.service("h", 20, made.here)
        made.publish(web, here, made.service("nobody", 30))
        yield made


def programmed(two: TwoNodes) -> set[str]:
    """Return the names of the near node's devices that currently have our programs."""
    attached = attacher(StateDir(Path(two.agents[0].paths.state))).attached
    found = call_in(NETNS / two.near.netns, lambda: set(map(socket.if_indextoname, attached())))
    return found & {"br0", "up0"}


def until_programmed(two: TwoNodes, *names: str) -> None:
    wait_until(f"{names} have the programs", lambda: programmed(two) == set(names))


@contextmanager
def clients(two: TwoNodes, frontends: Frontends) -> Iterator[None]:
    """Send requests from outside during the block; none may fail."""
    both = [frontends.to("nodeport", two.near, v6=v6) for v6 in (False, True)]
    ways = product(("tcp", "udp"), both)
    started = [two.start_client(two.outside, it, *to, pause=0.005) for it, to in ways]
    yield
    assert [two.stop_client(client)["errors"] for client in started] == [{}] * len(started)


@pytest.mark.parametrize("change", CHANGES)
def test_the_port_gets_its_programs_back(two: TwoNodes, change: Set) -> None:
    """A port that needs programs gets them. Later the bridge alone has programs again. No open
    connection is lost.

    On netfilter a new connection between the change and the attachment fails. Afterwards the
    kernel drops requests for endpoints on other nodes, with kube-proxy too, because they would
    leave by the port where they have come in.
    """
    has_gap = two.engine is Engine.NETFILTER and change is not second_port
    frontends = HERE if has_gap else WEB
    until_programmed(two, "br0")
    both = [frontends.to("nodeport", two.near, v6=v6) for v6 in (False, True)]
    opened = [two.connected("outside", where) for where in both]
    with ExitStack() as load:
        if not has_gap:
            load.enter_context(clients(two, frontends))
        change(two, True)
        until_programmed(two, "br0", "up0")
        load.enter_context(clients(two, frontends))
        change(two, False)
        until_programmed(two, "br0")
    assert all(map(requests.lives, opened))
