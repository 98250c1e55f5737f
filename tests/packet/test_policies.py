# SPDX-License-Identifier: Apache-2.0
"""The endpoints that a client reaches, and the source they see: the table of kube-proxy.md 5.3.

L is the endpoint on this node, R an endpoint elsewhere; a star means that the endpoint sees this
node as its client. Clients on the node itself are served at their sockets, and not tested here.
"""

from typing import Any

import pytest

from ebpflb.entries.services import NO_PREFIX
from tests.packet.frames import at, destination, ends, host_of, reply, segment, source
from tests.packet.node import PacketNode
from tests.packet.places import V4, V6, Places
from tests.packet.services import KINDS, serve

EXTERNAL = ("nodeport", "balancer", "external")
CONNECTIONS = 16  # they meet both endpoints: which one is a function of the tuple

# sender, frontend, policy: with a detector, without, and with masquerade-all (detector active)
TABLE = [
    ("pod", "cluster", "Cluster", "L R", "L R", "L* R*"),
    ("pod", "cluster", "Local", "L", "L", "L*"),
    ("client", "cluster", "Cluster", "L* R*", "L R", "L* R*"),
    ("client", "cluster", "Local", "L*", "L", "L*"),
    ("remote_pod", "cluster", "Cluster", "L R", "L R", "L* R*"),
    *(("pod", kind, "Cluster", "L* R*", "L R*", "L* R*") for kind in EXTERNAL),
    *(("pod", kind, "Local", "L R", "L", "L R") for kind in EXTERNAL),
    *(("client", kind, "Cluster", "L R*", "L R*", "L R*") for kind in EXTERNAL),
    *(("client", kind, "Local", "L", "L", "L") for kind in EXTERNAL),
]
SETTINGS = {"detected": 0, "blind": 1, "all": 2}  # columns of the table


def met(node: PacketNode, places: Places, sender: str, where: str) -> str:
    """Return the endpoints that a client's flows reach, and the source that they see."""
    into = "pods" if sender == "pod" else "uplink"
    found = set()
    for port in range(50_000, 50_000 + CONNECTIONS):
        client = at(getattr(places, sender), port)
        came = node.ingress(segment(client, where), into)
        letter = "L" if host_of(destination(came.packet)) == places.here else "R"
        by = "pods" if letter == "L" else "uplink"
        left = node.egress(came.packet, by)
        needs_snat = source(left.packet) != client
        found.add(letter + "*" * needs_snat)
        answer = node.ingress(reply(left.packet), by)
        assert ends(node.egress(answer.packet, into).packet) == f"{where} > {client}"
    return " ".join(sorted(found))


def publish(node: PacketNode, places: Places, kind: str, policy: str) -> str:
    here, there = at(places.here, 8080), at(places.there, 8080)
    words = ["local"] if policy == "Local" else []
    lists: dict[str, Any] = {"cluster": [here, there], "local": [here], "here": [here]}
    return serve(node, places, kind, "tcp", *words, **lists)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join(row[:3]))
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_cell_of_the_table_holds(
    node: PacketNode, places: Places, row: tuple[str, ...], setting: str
) -> None:
    """The table holds in every cell, under three settings."""
    sender, kind, policy, *cells = row
    words = {"detected": "detect_local", "blind": "guard_nodeports", "all": ""}[setting]
    node.settings(*words.split() or ("detect_local", "masquerade_all"))
    where = publish(node, places, kind, policy)
    assert met(node, places, sender, where) == cells[SETTINGS[setting]]


@pytest.mark.parametrize("kind", EXTERNAL)
@pytest.mark.parametrize(("policy", "endpoints"), [("Cluster", "L* R*"), ("Local", "L")])
def test_masquerade_here(
    node: PacketNode, places: Places, kind: str, policy: str, endpoints: str
) -> None:
    """With --masquerade-local-backends clients outside are masqueraded to local endpoints too, as
    in kube-proxy.
    """
    node.settings("detect_local", "masquerade_here")
    where = publish(node, places, kind, policy)
    assert met(node, places, "client", where) == endpoints


@pytest.mark.parametrize("kind", KINDS)
def test_device_tells_pods(node: PacketNode, places: Places, kind: str) -> None:
    """If pods are recognized by their devices, a client that comes in by such a device is a pod."""
    nothing = {"pods_v4": NO_PREFIX, "pods_v6": NO_PREFIX}
    node.settings("detect_local", **nothing)
    node.device("pods", V4.bridge, V6.bridge, "pods")
    where = publish(node, places, kind, "Local")
    assert met(node, places, "pod", where) == ("L" if kind == "cluster" else "L R")
    assert met(node, places, "remote_pod", where) == ("L*" if kind == "cluster" else "L")


def test_detector_of_one_family(node: PacketNode, places: Places) -> None:
    """If a family has no pod prefix, its pods are not recognized, and none of its clients is
    masqueraded.
    """
    node.settings("detect_local", **{f"pods_v{places.version}": NO_PREFIX})
    where = publish(node, places, "cluster", "Cluster")
    assert met(node, places, "client", where) == "L R"
    other = V4 if places is V6 else V6
    where = publish(node, other, "cluster", "Cluster")
    assert met(node, other, "client", where) == "L* R*"
