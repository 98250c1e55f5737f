# SPDX-License-Identifier: Apache-2.0
"""The results of clients that ask a service: which endpoints answer, whom these see, a refusal, or
nothing.

Each case is a state of the cluster and the result of each client (tests.kit.cells), on two nodes,
in both families and protocols. "policies" is the table of kube-proxy.md 5.3, cell by cell. Two
things differ from kube-proxy; there kube-proxy's cell follows ours:

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
    SAME,
    SILENT,
    UNANSWERED,
    Case,
    Row,
)
from tests.kit.lab_cluster import TARGET
from tests.kit.two_nodes import Frontends, Topology

CLUSTER, EXTERNAL, INTERNAL = (number for number, _ in cells.POLICIES.values())
ANY, PACKETS = "outside unhooked hooked near", "outside unhooked"
ALL = "cluster nodeport external balancer"
FROM_OUTSIDE = "nodeport balancer external"
BOTH, MIXED = "here there", "here=client there=node"
UNALLOCATED = 99  # no service has this number
AFFINITY: dict[str, Any] = {
    "sessionAffinity": "ClientIP",
    "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 10800}},
}
BY_TOPOLOGY = {"service.kubernetes.io/topology-mode": "Auto"}  # asked for until Kubernetes 1.30
PROXY_NAME, ZONE = "service.kubernetes.io/service-proxy-name", "topology.kubernetes.io/zone"


def policies(two: Topology) -> list[Any]:
    return cells.services(two, two.here, two.there)


def nobody(two: Topology) -> list[Any]:
    return [manifests.service_cidr("10.96.0.0/16", "fd00:96::/64"), two.service("nobody", 10)]


def elsewhere(two: Topology) -> list[Any]:
    return [
        two.service("external", EXTERNAL, two.there, externalTrafficPolicy="Local"),
        two.service("internal", INTERNAL, two.there, internalTrafficPolicy="Local"),
    ]


def only_for(two: Topology, *hosts: Host, more: tuple[str, ...] = ()) -> list[Manifest]:
    """Return a load balancer for these clients only, with ranges of both families."""
    own = [f"{host.v4}/32" for host in hosts] + [f"{host.v6}/128" for host in hosts]
    sources = [*own, *more, "240.0.0.0/32", "fd99::/128"]
    return two.service("web", 10, two.here, two.there, loadBalancerSourceRanges=sources)


def leaving(two: Topology, **policy: str) -> list[Manifest]:
    """Return a Service whose only endpoint, on the near node, is terminating."""
    conditions = {"ready": False, "terminating": True}
    return two.service("web", 10, two.here, conditions=conditions, **policy)


def second_slice(two: Topology, pod: Host, **conditions: bool) -> list[Manifest]:
    """Return another slice of each family for the Service "web"."""
    ports = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
    return [
        manifests.endpoint_slice(
            "web",
            family,
            two.endpoints(pod, v6=family == "IPv6", **conditions),
            ports,
            name=f"second-{family.lower()}",
        )
        for family in ("IPv4", "IPv6")
    ]


def by_proxy(number: int) -> list[Manifest]:
    """Return the addresses of a load balancer that translates them itself."""
    return [{"ip": it, "ipMode": "Proxy"} for it in Frontends(number).balancer]


def zoned_nodes(two: Topology) -> list[Manifest]:
    """Return the nodes: the near one in zone one, the far one in zone two."""
    return [
        manifests.node(node.name, node.v4, node.v6, labels={ZONE: zone})
        for node, zone in ((two.near, "one"), (two.far, "two"))
    ]


def hinted(two: Topology, **zones: str) -> list[Manifest]:
    """Return a Service whose endpoints have these hints."""
    pods = [getattr(two, name) for name in zones]
    service, *slices = two.service("web", 10, *pods, annotations=BY_TOPOLOGY)
    for each in slices:
        for endpoint, zone in zip(each["endpoints"], zones.values(), strict=True):
            endpoint["hints"] = {"forZones": [{"name": zone}]}
    return [service, *slices]


# Pods and processes of the endpoint's node are served, those of the other one are not.
INSIDE = [Row("hooked near", 10, "cluster", "here"), Row("there far", 10, "cluster", SILENT)]
CASES = {
    "policies": Case(
        policies,
        [
            Row("unhooked", CLUSTER, "cluster", BOTH_CLIENT),
            Row("unhooked", CLUSTER, FROM_OUTSIDE, BOTH_NODE),
            Row("unhooked", EXTERNAL, ALL, BOTH_CLIENT),
            Row("unhooked", INTERNAL, "cluster", HERE_CLIENT),
            Row("unhooked", INTERNAL, FROM_OUTSIDE, BOTH_NODE),
            Row("hooked", CLUSTER, "cluster", BOTH_CLIENT),
            Row("hooked", CLUSTER, FROM_OUTSIDE, BOTH_CLIENT, BOTH_NODE),
            Row("hooked", EXTERNAL, ALL, BOTH_CLIENT),
            Row("hooked", INTERNAL, "cluster", HERE_CLIENT),
            Row("hooked", INTERNAL, FROM_OUTSIDE, BOTH_CLIENT, BOTH_NODE),
            Row("near", CLUSTER, ALL, BOTH_NODE),
            Row("near", EXTERNAL, ALL, BOTH_NODE),
            Row("near", INTERNAL, "cluster", HERE_NODE),
            Row("near", INTERNAL, FROM_OUTSIDE, BOTH_NODE),
            Row("far", CLUSTER, "nodeport", MIXED, BOTH_NODE),
            Row("far", EXTERNAL, "nodeport", HERE_CLIENT),
            Row("far", INTERNAL, "nodeport", MIXED, BOTH_NODE),
            Row("outside", CLUSTER, "cluster", BOTH_NODE),
            Row("outside", CLUSTER, FROM_OUTSIDE, MIXED, BOTH_NODE),
            Row("outside", EXTERNAL, "cluster", BOTH_NODE),
            Row("outside", EXTERNAL, FROM_OUTSIDE, HERE_CLIENT),
            Row("outside", INTERNAL, "cluster", HERE_NODE),
            Row("outside", INTERNAL, FROM_OUTSIDE, MIXED, BOTH_NODE),
        ],
    ),
    # A service without endpoints refuses (kube-proxy.md 6), by each of its addresses.
    "no endpoint": Case(nobody, [Row(ANY, 10, ALL, REFUSED)]),
    # A port of a cluster IP that is no service's is refused; of an external address left alone.
    "unknown port": Case(
        policies,
        [
            Row(PACKETS, CLUSTER, "cluster+1", REFUSED),
            Row(PACKETS, CLUSTER, "external+1 balancer+1", SILENT),
        ],
    ),
    # An address kept for cluster IPs that is none swallows everything.
    "unallocated": Case(nobody, [Row(PACKETS, UNALLOCATED, "cluster", SILENT)], "unallocated"),
    # Under the external policy Local outside clients of a node without endpoints get nothing, under
    # the internal one no one does by the cluster IP.
    "endpoints elsewhere": Case(
        elsewhere,
        [Row("outside", EXTERNAL, FROM_OUTSIDE, SILENT), Row(PACKETS, INTERNAL, "cluster", SILENT)],
        "no_local_endpoint",
    ),
    # Whose address is in loadBalancerSourceRanges is served (kube-proxy.md 7); everyone else gets
    # nothing, pods and the node too. Cluster IP, NodePort and external IP are open to all.
    "some sources": Case(
        lambda two: [only_for(two, two.outside, two.hooked)],
        [
            Row("outside hooked", 10, ALL, BOTH),
            Row("unhooked near", 10, "balancer", SILENT),
            Row("unhooked near", 10, "cluster nodeport external", BOTH),
        ],
    ),
    "other sources": Case(
        lambda two: [only_for(two, two.unhooked, two.near)],
        [Row("unhooked near", 10, ALL, BOTH), Row("outside hooked", 10, "balancer", SILENT)],
    ),
    # Kubernetes' e2e tests: an endpoint that terminates serves while there is no
    # other, by cluster IP and either node's port.
    "internal Local": Case(
        lambda two: [two.service("web", 10, two.here, internalTrafficPolicy="Local")], INSIDE
    ),
    "internal Local leaving": Case(
        lambda two: [leaving(two, internalTrafficPolicy="Local")], INSIDE
    ),
    "leaving": Case(
        lambda two: [leaving(two)],
        [Row("hooked near there far", 10, "cluster nodeport nodeport@far", "here")],
    ),
    "external Local leaving": Case(
        lambda two: [leaving(two, externalTrafficPolicy="Local")],
        [
            Row("hooked there far", 10, "nodeport", "here"),
            Row("hooked near", 10, "nodeport@far", SILENT),
            Row("there far", 10, "nodeport@far", "here"),
        ],
    ),
    # A request to another node's port travels to that node, and comes back as its.
    "another node": Case(
        lambda two: [two.service("web", 10, two.here)],
        [Row("hooked near", 10, "nodeport@far", "here=far")],
    ),
    # A client keeps its endpoint (kube-proxy.md 9), whatever its port.
    "affinity": Case(
        lambda two: [two.service("web", 10, two.here, two.there, **AFFINITY)],
        [Row(ANY, 10, ALL, SAME + BOTH)],
    ),
    # An endpoint reaches itself by its own Service.
    "hairpin": Case(
        lambda two: [two.service("web", 10, two.here)],
        [Row("here", 10, "cluster nodeport", "here")],
    ),
    # The endpoints of all slices of a Service are its own; those that are not ready are not used.
    "two slices": Case(
        lambda two: [two.service("web", 10, two.here), second_slice(two, two.there)],
        [Row(ANY, 10, ALL, BOTH)],
    ),
    "not ready": Case(
        lambda two: [
            two.service("web", 10, two.here),
            second_slice(two, two.there, ready=False, serving=False),
        ],
        [Row(ANY, 10, ALL, "here")],
    ),
    # Another proxy's Service, and the address of a load balancer that translates itself, are left
    # alone (kube-proxy.md 1.2, 1.4).
    "another proxy": Case(
        lambda two: [two.service("web", 10, two.here, labels={PROXY_NAME: "another"})],
        [Row(ANY, 10, ALL, UNANSWERED)],
    ),
    "ipMode Proxy": Case(
        lambda two: [two.service("web", 10, two.here, ingress=by_proxy(10))],
        [Row(ANY, 10, "balancer", UNANSWERED), Row(ANY, 10, "cluster nodeport", "here")],
    ),
    # Hints for zones count where each endpoint has one, and one of them is of this node's zone
    # (kube-proxy.md 3.1).
    "zones": Case(
        lambda two: [*zoned_nodes(two), hinted(two, here="one", there="two")],
        [
            Row("hooked unhooked near", 10, "cluster", "here"),
            Row("there far", 10, "cluster", "there"),
            Row("outside", 10, "nodeport", "here"),
        ],
    ),
    "zones without endpoints": Case(
        lambda two: [*zoned_nodes(two), hinted(two, here="three", there="three")],
        [Row("hooked unhooked near there far", 10, "cluster", BOTH)],
    ),
    # A range admits all that it covers.
    "wide range": Case(
        lambda two: [only_for(two, more=("198.51.0.0/16", "fd03::/16"))],
        [Row("outside", 10, "balancer", BOTH)],
    ),
    "narrow range": Case(
        lambda two: [only_for(two, more=("198.51.101.0/24", "fd03:1::/32"))],
        [Row("outside", 10, "balancer", SILENT)],
    ),
}
