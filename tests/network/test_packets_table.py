# SPDX-License-Identifier: Apache-2.0
"""Which endpoints answer, and which source they see: kube-proxy.md 5.3, cell by cell.

In each cell stand the endpoints that answer, each with whom it sees: the client, or the node, by
the address of the device that leads to the endpoint. Two things differ from kube-proxy:

* Sockets of hooked pods are connected to the endpoint itself; it sees the pod, whatever the table
  of kube-proxy says about masquerading.
* An endpoint here sees an external client as it is, under the policy Cluster too; with
  --masquerade-local-backends it sees the node.
"""

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kit import requests
from tests.kit.requests import Send
from tests.kit.two_nodes import ENGINES, Frontends, TwoNodes, address

pytestmark = pytest.mark.parametrize("two", ENGINES, indirect=True)

POLICIES = {
    "cluster": (10, {}),
    "external local": (20, {"externalTrafficPolicy": "Local"}),
    "internal local": (30, {"internalTrafficPolicy": "Local"}),
}
KINDS = {
    "cluster": ("cluster",),
    "external": ("nodeport", "balancer", "external"),
    "nodeport": ("nodeport",),
}
TIMES = 24  # misses one of two endpoints once in 8 million times

BOTH_CLIENT, BOTH_NODE = "here=client there=client", "here=node there=node"
TABLE = {
    # client, kind of frontend    policy Cluster   external Local  internal Local
    ("unhooked", "cluster"): (BOTH_CLIENT, BOTH_CLIENT, "here=client"),
    ("unhooked", "external"): (BOTH_NODE, BOTH_CLIENT, BOTH_NODE),
    ("hooked", "cluster"): (BOTH_CLIENT, BOTH_CLIENT, "here=client"),
    ("hooked", "external"): (BOTH_CLIENT, BOTH_CLIENT, BOTH_CLIENT),
    ("near", "cluster"): (BOTH_NODE, BOTH_NODE, "here=node"),
    ("near", "external"): (BOTH_NODE, BOTH_NODE, BOTH_NODE),
    ("far", "nodeport"): ("here=client there=node", "here=client", "here=client there=node"),
    ("outside", "cluster"): (BOTH_NODE, BOTH_NODE, "here=node"),
    ("outside", "external"): ("here=client there=node", "here=client", "here=client there=node"),
}
CELLS = [
    (who, kind, policy, cell)
    for (who, group), cells in TABLE.items()
    for kind in KINDS[group]
    for policy, cell in zip(POLICIES, cells, strict=True)
]

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
protocols = pytest.mark.parametrize("send", [requests.tcp, requests.udp])


def services_of(two: TwoNodes, *pods: Host) -> list[list[Manifest]]:
    """A service for each policy."""
    return [two.service(f"s{n}", n, *pods, **spec) for n, spec in POLICIES.values()]


@pytest.fixture(scope="module")
def services(two: TwoNodes) -> None:
    two.publish(*services_of(two, two.here, two.there))


def answers(
    two: TwoNodes, who: str, kind: str, policy: str, *, v6: bool, send: Send
) -> set[tuple[str, str]]:
    """The backends that answered, and the source that each saw."""
    client = two.sockets(getattr(two, who))
    where = Frontends(POLICIES[policy][0]).to(kind, two.near, v6=v6)
    found = (send(client, *where) for _ in range(TIMES))
    return {(answer.name, answer.source) for answer in found}


def meaning(two: TwoNodes, who: str, cell: str, *, v6: bool) -> set[tuple[str, str]]:
    """The same from a cell."""
    client = getattr(two, who)
    client = client.v6 if v6 else client.v4
    bridge = "fd00:244:1::1" if v6 else "10.244.1.1"
    node = {"here": bridge, "there": address(two.near, client)}
    pairs = (word.split("=") for word in cell.split())
    return {(name, client if seen == "client" else node[name]) for name, seen in pairs}


@pytest.mark.extended
@families
@protocols
@pytest.mark.parametrize(("who", "kind", "policy", "cell"), CELLS)
def test_cell(
    two: TwoNodes, services: None, who: str, kind: str, policy: str, cell: str, v6: bool, send: Send
) -> None:
    """Exactly the endpoints of the cell answer, and they see the source that it names."""
    found = answers(two, who, kind, policy, v6=v6, send=send)
    assert found == meaning(two, who, cell, v6=v6)
