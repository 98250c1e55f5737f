# SPDX-License-Identifier: Apache-2.0
"""What clients meet who ask a service: which endpoints, whom these see, a refusal, or nothing.

Each case is a state of the cluster and what each client meets there (tests.kit.cells), on two nodes
with each engine, in both families and protocols. "policies" is the table of kube-proxy.md 5.3, cell
by cell. Two things differ from kube-proxy:

* Sockets of hooked pods are connected to the endpoint itself; it sees the pod, whatever the table
  of kube-proxy says about masquerading.
* An endpoint here sees an external client as it is, under the policy Cluster too; with
  --masquerade-local-backends it sees the node.
"""

from typing import Any

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kit import cells
from tests.kit.cells import (
    BOTH_CLIENT,
    BOTH_NODE,
    HERE_CLIENT,
    HERE_NODE,
    REFUSED,
    SILENT,
    Case,
)
from tests.kit.parameters import both_engines, families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import TwoNodes

pytestmark = both_engines

CLUSTER, EXTERNAL, INTERNAL = (number for number, _ in cells.POLICIES.values())
ANY, PACKETS = "outside unhooked hooked near", "outside unhooked"
ALL = "cluster nodeport external balancer"
FROM_OUTSIDE = "nodeport balancer external"
BOTH, MIXED = "here there", "here=client there=node"
UNALLOCATED = 99  # no service has this number


def policies(two: TwoNodes) -> list[Any]:
    return cells.services(two, two.here, two.there)


def nobody(two: TwoNodes) -> list[Any]:
    return [manifests.service_cidr("10.96.0.0/16", "fd00:96::/64"), two.service("nobody", 10)]


def elsewhere(two: TwoNodes) -> list[Any]:
    return [
        two.service("external", EXTERNAL, two.there, externalTrafficPolicy="Local"),
        two.service("internal", INTERNAL, two.there, internalTrafficPolicy="Local"),
    ]


def only_for(two: TwoNodes, *hosts: Host, more: tuple[str, ...] = ()) -> list[Manifest]:
    """A load balancer that only these may ask; the ranges of both families are never empty."""
    own = [f"{host.v4}/32" for host in hosts] + [f"{host.v6}/128" for host in hosts]
    sources = [*own, *more, "240.0.0.0/32", "fd99::/128"]
    return two.service("web", 10, two.here, two.there, loadBalancerSourceRanges=sources)


def leaving(two: TwoNodes, **policy: str) -> list[Manifest]:
    """The only endpoint, on the near node, terminates."""
    conditions = {"ready": False, "terminating": True}
    return two.service("web", 10, two.here, conditions=conditions, **policy)


# Pods and processes of the endpoint's node are served, those of the other one are not.
INSIDE = [("hooked near", 10, "cluster", "here"), ("there far", 10, "cluster", SILENT)]
CASES = {
    "policies": Case(
        policies,
        [
            ("unhooked", CLUSTER, "cluster", BOTH_CLIENT),
            ("unhooked", CLUSTER, FROM_OUTSIDE, BOTH_NODE),
            ("unhooked", EXTERNAL, ALL, BOTH_CLIENT),
            ("unhooked", INTERNAL, "cluster", HERE_CLIENT),
            ("unhooked", INTERNAL, FROM_OUTSIDE, BOTH_NODE),
            ("hooked", CLUSTER, ALL, BOTH_CLIENT),
            ("hooked", EXTERNAL, ALL, BOTH_CLIENT),
            ("hooked", INTERNAL, "cluster", HERE_CLIENT),
            ("hooked", INTERNAL, FROM_OUTSIDE, BOTH_CLIENT),
            ("near", CLUSTER, ALL, BOTH_NODE),
            ("near", EXTERNAL, ALL, BOTH_NODE),
            ("near", INTERNAL, "cluster", HERE_NODE),
            ("near", INTERNAL, FROM_OUTSIDE, BOTH_NODE),
            ("far", CLUSTER, "nodeport", MIXED),
            ("far", EXTERNAL, "nodeport", HERE_CLIENT),
            ("far", INTERNAL, "nodeport", MIXED),
            ("outside", CLUSTER, "cluster", BOTH_NODE),
            ("outside", CLUSTER, FROM_OUTSIDE, MIXED),
            ("outside", EXTERNAL, "cluster", BOTH_NODE),
            ("outside", EXTERNAL, FROM_OUTSIDE, HERE_CLIENT),
            ("outside", INTERNAL, "cluster", HERE_NODE),
            ("outside", INTERNAL, FROM_OUTSIDE, MIXED),
        ],
    ),
    # A service without endpoints refuses (kube-proxy.md 6), by each of its addresses.
    "no endpoint": Case(nobody, [(ANY, 10, ALL, REFUSED)]),
    # A port of a cluster IP that is no service's is refused; of an external address left alone.
    "unknown port": Case(
        policies,
        [
            (PACKETS, CLUSTER, "cluster+1", REFUSED),
            (PACKETS, CLUSTER, "external+1 balancer+1", SILENT),
        ],
    ),
    # An address kept for cluster IPs that is none swallows everything.
    "unallocated": Case(nobody, [(PACKETS, UNALLOCATED, "cluster", SILENT)], "unallocated"),
    # Under the external policy Local outside clients of a node without endpoints get nothing, under
    # the internal one nobody does by the cluster IP.
    "endpoints elsewhere": Case(
        elsewhere,
        [("outside", EXTERNAL, FROM_OUTSIDE, SILENT), (PACKETS, INTERNAL, "cluster", SILENT)],
        "no_local_endpoint",
    ),
    # Whose address is in loadBalancerSourceRanges is served (kube-proxy.md 7); everyone else gets
    # nothing, pods and the node too. Cluster IP, NodePort and external IP are open to all.
    "some sources": Case(
        lambda two: [only_for(two, two.outside, two.hooked)],
        [
            ("outside hooked", 10, ALL, BOTH),
            ("unhooked near", 10, "balancer", SILENT),
            ("unhooked near", 10, "cluster nodeport external", BOTH),
        ],
    ),
    "other sources": Case(
        lambda two: [only_for(two, two.unhooked, two.near)],
        [("unhooked near", 10, ALL, BOTH), ("outside hooked", 10, "balancer", SILENT)],
    ),
    # Kubernetes' e2e tests (kube-proxy.md 18): an endpoint that terminates serves while there is no
    # other, by cluster IP and either node's port.
    "internal Local": Case(
        lambda two: [two.service("web", 10, two.here, internalTrafficPolicy="Local")], INSIDE
    ),
    "internal Local leaving": Case(
        lambda two: [leaving(two, internalTrafficPolicy="Local")], INSIDE
    ),
    "leaving": Case(
        lambda two: [leaving(two)],
        [("hooked near there far", 10, "cluster nodeport nodeport@far", "here")],
    ),
    "external Local leaving": Case(
        lambda two: [leaving(two, externalTrafficPolicy="Local")],
        [
            ("hooked there far", 10, "nodeport", "here"),
            ("hooked near", 10, "nodeport@far", SILENT),
            ("there far", 10, "nodeport@far", "here"),
        ],
    ),
    # A request to another node's port travels to that node, and comes back as its.
    "another node": Case(
        lambda two: [two.service("web", 10, two.here)],
        [("hooked near", 10, "nodeport@far", "here=far")],
    ),
    # A range admits all that it covers.
    "wide range": Case(
        lambda two: [only_for(two, more=("198.51.0.0/16", "fd03::/16"))],
        [("outside", 10, "balancer", BOTH)],
    ),
    "narrow range": Case(
        lambda two: [only_for(two, more=("198.51.101.0/24", "fd03:1::/32"))],
        [("outside", 10, "balancer", SILENT)],
    ),
}


case = cells.fixture(CASES)


@families
@protocols
@cells.rows(CASES)
def test_row(
    two: TwoNodes, case: Case, who: str, number: int, kind: str, cell: str, v6: bool, send: Send
) -> None:
    """A client meets what the row says, and each request is counted."""
    where = cells.at(two, number, kind, v6=v6)
    before = two.verdict(case.verdict) if case.verdict else 0
    cells.assert_cell(two, who, where, cell, send)
    assert not case.verdict or two.verdict(case.verdict) > before
