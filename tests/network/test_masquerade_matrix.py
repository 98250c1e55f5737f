# SPDX-License-Identifier: Apache-2.0
"""Who is masqueraded with which options, cell by cell (tests.kit.cells).

MATRIX has upstream's 30 flows under its 4 settings (kube-proxy.md 5.1, 19): three services, of the
policies Cluster, external Local and internal Local, each by ten ways. The pod is one whose sockets
no hook sees, and --masquerade-local-backends is on: so not one cell differs from kube-proxy's. What
the node sends itself is the node's, masqueraded or not. Where an outside client is not masqueraded
on its way to another node, the answers miss the node that was asked, and the connection is lost:
with kube-proxy too.
"""

import time
from collections.abc import Iterator

import pytest

from ebpflb.lab import cni, manifests
from ebpflb.model.packet_path import Engine
from ebpflb.plan.flow_entries import Hook
from tests.kit import cells, requests, two_nodes
from tests.kit.cells import BOTH_CLIENT, BOTH_NODE, HERE_CLIENT, HERE_NODE, POLICIES
from tests.kit.parameters import families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import CLUSTER_CIDR, ENGINES, TwoNodes

MODE = "--detect-local-mode"
LOCAL = "--masquerade-local-backends"
MONOTONIC_COARSE = 6  # the clock by which flows are dated (uapi/linux/time.h)

NODE_ALWAYS = (BOTH_NODE, BOTH_NODE, BOTH_NODE)
OUTSIDE_ALWAYS = (BOTH_NODE, HERE_CLIENT, BOTH_NODE)
PLAIN = (BOTH_CLIENT, BOTH_CLIENT, HERE_CLIENT)
REPLY_LOST = ("here=client lost", "here=client lost", HERE_CLIENT)
MASQUERADED = (BOTH_NODE, BOTH_NODE, HERE_NODE)
POD_OUT = (BOTH_NODE, BOTH_CLIENT, BOTH_NODE)
POD_OUT_UNKNOWN = (BOTH_NODE, HERE_CLIENT, BOTH_NODE)

SETTINGS = {
    "base": (*CLUSTER_CIDR, LOCAL),
    "no detector": (LOCAL,),
    "masquerade all": (*CLUSTER_CIDR, LOCAL, "--masquerade-all"),
    "both": (LOCAL, "--masquerade-all"),
}
# who, kind: the services' cells, in each setting
MATRIX = {
    ("unhooked", "cluster"): (PLAIN, PLAIN, MASQUERADED, MASQUERADED),
    ("unhooked", "nodeport"): (POD_OUT, POD_OUT_UNKNOWN, POD_OUT, POD_OUT_UNKNOWN),
    ("unhooked", "balancer"): (POD_OUT, POD_OUT_UNKNOWN, POD_OUT, POD_OUT_UNKNOWN),
    ("near", "cluster"): (MASQUERADED,) * 4,
    ("near", "nodeport"): (NODE_ALWAYS,) * 4,
    ("near", "loopback"): (NODE_ALWAYS,) * 4,
    ("near", "balancer"): (NODE_ALWAYS,) * 4,
    ("outside", "cluster"): (MASQUERADED, REPLY_LOST, MASQUERADED, MASQUERADED),
    ("outside", "nodeport"): (OUTSIDE_ALWAYS,) * 4,
    ("outside", "balancer"): (OUTSIDE_ALWAYS,) * 4,
}
# Other ways to tell pods from others. By cluster IPs pods are seen as themselves, others as the
# node; Local confines no pod.
DETECTORS = {
    "NodeCIDR": (MODE, "NodeCIDR"),
    "BridgeInterface": (MODE, "BridgeInterface", "--pod-bridge-interface", "cni0"),
    "InterfaceNamePrefix": (MODE, "InterfaceNamePrefix", "--pod-interface-name-prefix", "veth"),
}
DETECTED = [
    ("unhooked", "cluster", "cluster", BOTH_CLIENT),
    ("outside", "cluster", "cluster", BOTH_NODE),
    ("unhooked", "nodeport", "external local", BOTH_CLIENT),
    ("outside", "nodeport", "external local", HERE_CLIENT),
]
OPTIONS = {
    **SETTINGS,
    **DETECTORS,
    "ports": (*CLUSTER_CIDR, "--masquerade-ports", "31000-31999"),
}


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """The name of the options, who asks by what kind of frontend, the policy, and the cell."""
    for at, setting in enumerate(SETTINGS):
        for (who, kind), of_settings in MATRIX.items():
            for policy, cell in zip(POLICIES, of_settings[at], strict=True):
                yield setting, who, kind, policy, cell
    for detector in DETECTORS:
        for row in DETECTED:
            yield detector, *row


ROWS = list(rows())
assert len(ROWS) == 4 * 30 + 3 * 4


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    """Nodes with an engine, whose agents have the options of this name; services are published."""
    engine, name = request.param
    with two_nodes.running(tmp_path_factory.mktemp("two"), *OPTIONS[name], engine=engine) as made:
        nodes = [
            manifests.node(node.name, node.v4, node.v6, pod_cidrs=cni.network(number))
            for number, node in enumerate((made.near, made.far), start=1)
        ]
        made.publish(nodes, *cells.services(made, made.here, made.there))
        yield made


@families
@protocols
@pytest.mark.parametrize(
    ("two", "who", "kind", "policy", "cell"),
    [((engine, name), *row) for engine in ENGINES for name, *row in ROWS],
    indirect=["two"],
    ids=[f"{engine} {'-'.join(row)}" for engine in ENGINES for row in ROWS],
)
def test_flow(
    two: TwoNodes, who: str, kind: str, policy: str, cell: str, v6: bool, send: Send
) -> None:
    """Exactly the endpoints of the cell answer, and they see the source as with kube-proxy."""
    where = cells.at(two, POLICIES[policy][0], kind, v6=v6)
    cells.assert_cell(two, who, where, cell, send)


@families
@protocols
@pytest.mark.parametrize("two", [(Engine.FLOWS, "ports")], indirect=True, ids=["flows ports"])
def test_masquerade_ports(two: TwoNodes, v6: bool, send: Send) -> None:
    """What goes on as the node comes from the ports that the operator chose."""
    began = time.clock_gettime_ns(MONOTONIC_COARSE)
    where = cells.at(two, POLICIES["cluster"][0], "cluster", v6=v6)
    cells.assert_cell(two, "outside", where, BOTH_NODE, send)
    flows = two.maps["tcp_flows" if send is requests.tcp else "other_flows"].items()
    ports = {
        flow.port
        for to, flow in flows
        if flow.created >= began
        and to.hook == Hook.EGRESS
        and {"request", "masquerade"} <= flow.flags
    }
    assert ports
    assert ports <= set(range(31000, 32000))
