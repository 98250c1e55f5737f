# SPDX-License-Identifier: Apache-2.0
"""Clients whose frames have priority tags (802.1p: VLAN id 0) are served as those without."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import if_nametoindex

import pytest
from pyroute2.netns import setns

from ebpflb.kernel.attach.clsact import Clsact
from ebpflb.kernel.programs import loader
from ebpflb.kernel.programs.loader import Program
from ebpflb.lab.netns import Namespace
from ebpflb.lab.router import NODES
from tests.kit import requests
from tests.kit.parameters import families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

WEB = 10
PRIORITY = 5 << 13
CLIENTS = {"unhooked": "cluster", "outside": "nodeport"}

clients = pytest.mark.parametrize("who", CLIENTS)
protocols = pytest.mark.parametrize("send", [requests.tcp, requests.udp, requests.fragmented])


@pytest.fixture(scope="module", autouse=True)
def services(two: TwoNodes) -> None:
    two.publish(two.service("web", WEB, two.here, two.there))


@pytest.fixture(params=[[PRIORITY], [PRIORITY, PRIORITY]], ids=["one", "two"])
def tagging(two: TwoNodes, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """All frames of the unhooked client have these tags, and all that come from the router.

    The kernel keeps the outermost in the skb.
    """
    places = {"unhooked": (two.unhooked, "eth0"), "router": (two.lab.router, f"{NODES.name}1")}
    for name, place in places.items():
        tag(*place, tmp_path / name, request.param)
    yield
    for name, place in places.items():
        tag(*place, tmp_path / name, [])


def tag(host: Namespace, device: str, folder: Path, tags: list[int]) -> None:
    """A program at the device's egress pushes the tags; with none there is no program."""

    def attach() -> None:
        setns(host.netns)
        hook = Clsact(folder)
        if not tags:
            hook.detach(hook.recorded())
            return
        folder.mkdir()
        fd = loader.load_one("tag", loader.PACKET_SECTIONS["tc/egress"], pushing(tags))
        hook.attach(if_nametoindex(device), [Program("egress", fd, 0)])
        os.close(fd)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(attach).result()


def pushing(tags: list[int]) -> bytes:
    """r6 = r1; for each: bpf_skb_vlan_push(r6, htons(ETH_P_8021Q), tag); return TC_ACT_UNSPEC."""
    calls = [
        "bf61000000000000 b702000081000000"
        f"b7030000{number.to_bytes(4, 'little').hex()} 8500000012000000"
        for number in tags
    ]
    return bytes.fromhex("bf16000000000000" + "".join(calls) + "b7000000ffffffff9500000000000000")


@families
@protocols
@clients
def test_frames_with_a_priority_tag_are_served(
    two: TwoNodes, tagging: None, who: str, send: Send, v6: bool
) -> None:
    """Connections, datagrams and fragments; the client sees the service's address."""
    where = Frontends(WEB).to(CLIENTS[who], two.near, v6=v6)
    sockets = two.sockets(getattr(two, who))
    answers = [send(sockets, *where) for _ in range(20)]
    assert {answer.name for answer in answers} == {"here", "there"}
    assert {answer.peer for answer in answers} == {where}
