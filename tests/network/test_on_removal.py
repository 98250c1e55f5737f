# SPDX-License-Identifier: Apache-2.0
"""Connections whose endpoint is removed, with on-removal, of sockets and of packets."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ebpflb.kernel.node import sock_diag
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kernel.node import nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.on_removal import SOON, held, is_reset, one_each, saying
from tests.kit.parameters import families, flow_tables, netfilter, packet_clients
from tests.kit.requests import connected, lives
from tests.kit.sockets import CALL_SECONDS, Socket
from tests.kit.two_nodes import Frontends, TwoNodes

WEB = Frontends(10)
A_MOMENT = 1.0  # seconds in which a reset would have come

ends_sockets = pytest.mark.skipif(
    not sock_diag.can_destroy(socket.IPPROTO_TCP), reason="this kernel ends no sockets"
)


def by_sockets(*where: str) -> object:
    return pytest.param(*where, marks=ends_sockets)


clients = pytest.mark.parametrize("who", [by_sockets("hooked"), "unhooked"])


@pytest.fixture
def stack(two: TwoNodes) -> Iterator[ExitStack]:
    two.delete_flows("tcp_flows")
    with ExitStack() as made:
        yield made


def web(two: TwoNodes, value: str | None, *pods: Host) -> list[Manifest]:
    """Return the Service with these endpoints and this value of on-removal."""
    return saying(two.service("web", 10, *pods), value)


def open_each(
    two: TwoNodes, stack: ExitStack, who: str, *names: str, to: Frontends = WEB
) -> dict[str, Socket]:
    """Open connections of a client by the cluster IP, one to each of these endpoints."""
    sockets, where = two.sockets(getattr(two, who)), to.to("cluster", two.near)
    return one_each(stack, lambda: connected(sockets, *where), *names)


@ends_sockets
@flow_tables
@pytest.mark.parametrize("family", ["v4", "v6", "mapped"])
@pytest.mark.parametrize("who", ["hooked", "near"])
def test_sockets_of_endpoints_that_go_are_ended(
    two: TwoNodes, stack: ExitStack, who: str, family: str
) -> None:
    """Sockets of waiting clients, and of servers on either node, are ended. Connections to other
    endpoints, or directly to the removed one's address, stay.
    """
    two.publish(web(two, SOON, two.here, two.twin, two.there))
    sockets = two.sockets(getattr(two, who))
    address, port = WEB.to("cluster", two.near, v6=family == "v6")
    address = f"::ffff:{address}" if family == "mapped" else address
    found = one_each(stack, lambda: connected(sockets, address, port), "here", "twin", "there")
    itself = two.twin.v6 if family == "v6" else two.twin.v4
    direct = stack.enter_context(connected(sockets, itself, TARGET)[0])
    two.publish(web(two, SOON, two.here))
    assert is_reset(found["twin"])
    assert is_reset(found["there"])
    wait_until("one endpoint is told", lambda: held(two.twin) == 1)
    wait_until("the other is told", lambda: held(two.there) == 0)
    assert all(map(lives, [found["here"], direct]))


def set_conntrack(two: TwoNodes, liberal: bool, loose: bool) -> None:
    with nodes.entered(two.near.netns):
        for name, value in (("be_liberal", liberal), ("loose", loose)):
            Path(f"/proc/sys/net/netfilter/nf_conntrack_tcp_{name}").write_text(str(int(value)))


@pytest.fixture
def conntrack_settings(two: TwoNodes, liberal: bool, loose: bool) -> Iterator[None]:
    set_conntrack(two, liberal, loose)
    yield
    set_conntrack(two, liberal=False, loose=True)


@netfilter
@families
@pytest.mark.parametrize("liberal", [False, True], ids=["strict", "liberal"])
@pytest.mark.parametrize("loose", [False, True], ids=["not loose", "loose"])
@packet_clients
def test_a_client_of_packets_is_reset_when_it_sends(
    two: TwoNodes,
    stack: ExitStack,
    who: str,
    kind: str,
    v6: bool,
    loose: bool,
    conntrack_settings: None,
) -> None:
    """The client's segment goes to another endpoint, whose reset is translated back. If conntrack
    picks up no connection in the middle, the segment is lost, or reset by the node with that
    address. Clients of other endpoints keep their connections.
    """
    two.publish(web(two, SOON, two.here, two.there))
    sockets, to = two.sockets(getattr(two, who)), WEB.to(kind, two.near, v6=v6)
    found = one_each(stack, lambda: connected(sockets, *to), "here", "there")
    gone = f"conntrack to {two.there.v6 if v6 else two.there.v4} port {TARGET} reset"
    before = two.agents[0].log().count(gone)
    two.publish(web(two, SOON, two.here))
    wait_until("its entry is deleted", lambda: two.agents[0].log().count(gone) > before)
    found["there"].send(b"is anybody there?")
    is_told = loose or kind == "nodeport"
    found["there"].settimeout(CALL_SECONDS if is_told else A_MOMENT)
    assert is_reset(found["there"]) == is_told
    assert lives(found["here"])


@flow_tables
@ends_sockets
def test_operators_see_the_setting_and_the_log(two: TwoNodes, stack: ExitStack) -> None:
    """`services` shows the setting; a removed part of its value is named in `status` and
    `check`.
    """
    two.publish(web(two, f"{SOON},terminating=5s/30s", two.here, two.twin))
    assert "reset=0s" in two.ebpflb("services", "get", "default/web").stdout
    what = "metadata.annotations[ebpflb.io/on-removal]: terminating was removed"
    removed = f"Service default/web: {what}"
    wait_until("status has it", lambda: removed in two.ebpflb("status").stdout)
    assert two.agents[0].log().count("terminating was removed") == 1
    assert "terminating was removed" in two.ebpflb("check").stdout
    client = open_each(two, stack, "hooked", "here")["here"]
    two.publish(web(two, SOON, two.twin))
    assert is_reset(client)
    said = f"default/web:tcp: 1 sockets to {two.here.v4} port {TARGET} reset"
    wait_until("it is logged", lambda: said in two.agents[0].log())
