# SPDX-License-Identifier: Apache-2.0
"""Which external IPs are served, and who is admitted to NodePorts, as the operator says."""

from ebpflb.lab import cni, manifests
from ebpflb.lab.manifests import Manifest
from tests.kit import cells, two_nodes
from tests.kit.cells import UNANSWERED, Case, Row
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, Topology, TwoNodes

GUARDED, OTHER, OPEN, THIEF = 10, 20, 30, 40
EXTERNAL = "--external-ips", "203.0.113.0/28,fd03:113::10/128"
NODEPORTS = "--nodeport-source-ranges", "198.51.100.0/24,fd03::/64"
UNSPECIFIED = "0.0.0.0", "::"
PORTS = [{"name": name, "protocol": name.upper()} for name in ("tcp", "udp")]
ANNOTATION = "ebpflb.io/nodeport-source-ranges"
TAKEN = Frontends(OPEN).nodeport
ANY = "outside unhooked hooked near"


def everything(two: Topology) -> list[list[Manifest]]:
    numbers = {"web": GUARDED, "other": OTHER, "open": OPEN}
    services = {name: two.service(name, n, two.here) for name, n in numbers.items()}
    services["other"][0]["metadata"]["annotations"] = {ANNOTATION: ",".join(cni.NETWORKS)}
    services["open"][0]["metadata"]["annotations"] = {ANNOTATION: ""}
    return [*services.values(), thief(two)]


two = two_nodes.fixture(*EXTERNAL, *NODEPORTS, publish=lambda made: made.publish(*everything(made)))


def thief(two: Topology) -> list[Manifest]:
    """A Service whose load balancer is said to have unspecified addresses, on a NodePort's port."""
    ports = [{**each, "port": TAKEN} for each in PORTS]
    answers = [{**each, "port": TARGET} for each in PORTS]
    cluster = Frontends(THIEF).cluster
    return [
        manifests.service("a-thief", cluster, ports, type="LoadBalancer", ingress=UNSPECIFIED),
        manifests.endpoint_slice("a-thief", "IPv4", two.endpoints(two.twin), answers),
        manifests.endpoint_slice("a-thief", "IPv6", two.endpoints(two.twin, v6=True), answers),
    ]


CASES = {
    # External IPs that the option allows are served to all; others are nobody's, and the Service's
    # other addresses are served.
    "external IPs": Case(
        everything,
        [
            Row(ANY, GUARDED, "external cluster", "here"),
            Row(ANY, OTHER, "external", UNANSWERED),
            Row(ANY, OTHER, "cluster", "here"),
        ],
    ),
    # NodePorts admit by source, by the option or by the Service's annotation instead; pods and the
    # node included.
    "NodePorts": Case(
        everything,
        [
            Row("outside", GUARDED, "nodeport", "here"),
            Row("unhooked hooked near", GUARDED, "nodeport", UNANSWERED),
            Row("unhooked hooked", OTHER, "nodeport", "here"),
            Row("outside near", OTHER, "nodeport", UNANSWERED),
            Row(ANY, OPEN, "nodeport cluster", "here"),
        ],
    ),
    # A Service that claims 0.0.0.0 and :: gets nobody's NodePort; its own frontends are served, at
    # the port of a NodePort.
    "a thief": Case(
        everything,
        [Row(ANY, OPEN, "nodeport", "here"), Row(ANY, THIEF, f"cluster+{TAKEN - 80}", "twin")],
    ),
}


case = cells.fixture(CASES)


@families
@protocols
@cells.rows(CASES)
def test_row(
    two: TwoNodes, case: Case, who: str, number: int, kind: str, cell: str, v6: bool, send: Send
) -> None:
    """A client meets what the row says."""
    cells.assert_cell(two, who, cells.at(two, number, kind, v6=v6), cell, send)


@families
def test_what_is_not_served_is_named_once(two: TwoNodes, v6: bool) -> None:
    """An external IP that is not allowed, and a load balancer's unspecified address."""
    log = two.agents[0].log()
    address = Frontends(OTHER).external[v6]
    assert log.count(f"spec.externalIPs: {address} is not served") == 1
    assert log.count(f'"{UNSPECIFIED[v6]}" is an unspecified address') == 1
