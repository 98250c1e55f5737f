# SPDX-License-Identifier: Apache-2.0
"""Slices, hints and claims, from API objects to a packet's backend (kube-proxy.md 1 to 4)."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from ebpflb.lab import manifests
from ebpflb.model import objects
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Removed
from tests.packet.cluster import TARGET, Cluster
from tests.packet.frames import at
from tests.packet.node import PacketNode
from tests.packet.places import Places

OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"
ZONE = "topology.kubernetes.io/zone"
NAMED = [{"name": "p", "port": 80}]


class SliceCluster(Cluster):
    """A cluster of which a test writes each slice."""

    def slice(
        self,
        name: str,
        *endpoints: dict[str, Any],
        ports: Sequence[dict[str, Any]] = ({"port": TARGET},),
        **labels: str,
    ) -> None:
        """Return a slice of the service ``web``, or of the service in its labels.

        Ignore remarks.
        """
        manifest = manifests.endpoint_slice(
            "web",
            f"IPv{self.places.version}",
            list(endpoints),
            self._ports(list(ports)),
            name=name,
            namespace="shop",
            labels=labels or None,
        )
        found = ReadObject(msgspec.convert(manifest, objects.EndpointSlice), "test")
        self.cluster.apply(Changed(Kind.ENDPOINT_SLICE, Key("shop", name), found))
        self._write()

    def without(self, name: str) -> None:
        """The slice is deleted."""
        self.cluster.apply(Removed(Kind.ENDPOINT_SLICE, Key("shop", name)))
        self._write()

    def zone(self, **labels: str) -> None:
        """Sets the labels of the Node."""
        node = msgspec.convert(manifests.node("here", labels=labels), objects.Node)
        self.cluster.apply(Changed(Kind.NODE, Key("", "here"), ReadObject(node, "test")))
        self._write()

    def claim(self, name: str, created: str, address: str) -> None:
        """A Service of this age with the external IP of all."""
        ports = self._ports([{"port": 80}])
        manifest = manifests.service(
            name, [address], ports, namespace="shop", externalIPs=[self.places.external]
        )
        manifest["metadata"]["creationTimestamp"] = created
        self._apply(Key("shop", name), msgspec.convert(manifest, objects.Service))

    def one(self, letter: str, state: str = "ready", **fields: Any) -> dict[str, Any]:
        """An endpoint in this state."""
        return self._endpoint(letter, state) | fields

    def hinted(self, letter: str, *zones: str, nodes: tuple[str, ...] = ()) -> dict[str, Any]:
        for_zones, for_nodes = ([{"name": name} for name in names] for names in (zones, nodes))
        return self.one(letter, hints={"forZones": for_zones, "forNodes": for_nodes})

    def met(self, sender: str = "pod") -> str:
        """Return the endpoints that answer at the cluster IP."""
        return self.outcome_of(sender, at(self.places.cluster_ip, 80))


@pytest.fixture
def cluster(node: PacketNode, places: Places) -> SliceCluster:
    return SliceCluster(node, places)


def test_slices_are_united(cluster: SliceCluster) -> None:
    """All slices count, with port numbers of their own; one that goes takes only its endpoints, and
    one endpoint in two slices stays until both are gone (2).
    """
    cluster.service(ports=NAMED)
    cluster.slice("x", cluster.one("a"), cluster.one("c"), ports=[{"name": "p", "port": 9090}])
    cluster.slice("y", cluster.one("b"), ports=[{"name": "p", "port": 9091}])
    cluster.slice("z", cluster.one("c"), ports=[{"name": "p", "port": 9090}])
    assert cluster.met() == "a b c"
    cluster.without("x")
    assert cluster.met() == "b c"
    cluster.without("z")
    assert cluster.met() == "b"


@pytest.mark.parametrize(("ready", "leaving"), ["xy", "yx"])
def test_duplicates(cluster: SliceCluster, ready: str, leaving: str) -> None:
    """If two slices have one address and port, the one that does not terminate wins (2)."""
    cluster.service()
    cluster.slice(ready, cluster.one("a"))
    cluster.slice(leaving, cluster.one("a", "leaving"))
    cluster.slice("z", cluster.one("c"))
    assert cluster.met() == "a c"
    cluster.without(ready)
    assert cluster.met() == "c"


def test_slice_before_its_service(cluster: SliceCluster) -> None:
    """A slice may come before its Service, and outlive it (2)."""
    cluster.slice("x", cluster.one("a"))
    assert cluster.met() == "dropped"
    cluster.service()
    assert cluster.met() == "a"
    cluster.withdraw()
    assert cluster.met() == "dropped"
    cluster.service()
    assert cluster.met() == "a"


def test_names_of_ports(cluster: SliceCluster) -> None:
    """A service port has the endpoints of its own name and protocol, and of numbered ports (2)."""
    cluster.service(ports=NAMED)
    cluster.slice("x", cluster.one("a"), ports=[{"name": "q", "port": 9090}])
    cluster.slice("y", cluster.one("b"), ports=[{"name": "p", "port": 9090, "protocol": "UDP"}])
    cluster.slice("z", cluster.one("c"), ports=[{"name": "p"}])
    assert cluster.met() == "refused"
    cluster.slice("z", cluster.one("c"), ports=[{"name": "p", "port": 9090}])
    assert cluster.met() == "c"


def test_whose_slice(cluster: SliceCluster) -> None:
    """The label alone tells the Service; addresses[0] counts, and what is unsaid is well (2)."""
    cluster.service()
    cluster.slice("web", cluster.one("a"), app="web")
    of_another: dict[str, Any] = {"kubernetes.io/service-name": "other"}
    cluster.slice("x", cluster.one("b"), **of_another)
    assert cluster.met() == "refused"
    several = [cluster.pods.c, cluster.pods.d]
    cluster.slice("y", {"addresses": several}, {"addresses": []})
    assert cluster.met() == "c"


def test_zones(cluster: SliceCluster, places: Places) -> None:
    """Hints of the ready ones alone count, if each has one and one names this zone; not for the
    local list (3.1).
    """
    local: dict[str, Any] = {"externalTrafficPolicy": "Local", "externalIPs": [places.external]}
    cluster.service(type="LoadBalancer", **local)
    cluster.slice("x", cluster.hinted("a", "other"), cluster.hinted("c", "other", "mine"))
    assert cluster.met() == "a c"
    cluster.zone(**{ZONE: "mine"})
    assert cluster.met() == "c"
    assert cluster.outcome_of("pod", at(places.external, 80)) == "c"
    assert cluster.outcome_of("client", at(places.external, 80)) == "a"
    cluster.slice("y", cluster.one("d", "unready"))
    assert cluster.met() == "c"
    cluster.slice("y", cluster.one("d"))
    assert cluster.met() == "a c d"


def test_nodes_before_zones(cluster: SliceCluster) -> None:
    """A node's hint goes before a zone's, wherever the endpoint is; without either all do (3.1)."""
    cluster.service()
    cluster.zone(**{ZONE: "mine"})
    zoned = cluster.hinted("a", "mine", nodes=("there",))
    cluster.slice("x", zoned, cluster.hinted("c", "other", nodes=("there", "here")))
    assert cluster.met() == "c"
    cluster.slice("x", zoned, cluster.hinted("c", "other", nodes=("there",)))
    assert cluster.met() == "a"
    cluster.zone()
    assert cluster.met() == "a c"


def test_external_by_its_spec(cluster: SliceCluster, places: Places) -> None:
    """The policy Local counts for a Service that is external by type or external IP, and for no
    other, whatever addresses its status has (1.4).
    """
    spec: dict[str, Any] = {"externalTrafficPolicy": "Local", "ingress": [{"ip": places.balancer}]}
    cluster.service(**spec)
    cluster.slice("x", cluster.one("c"))
    assert cluster.outcome_of("client", at(places.balancer, 80)) == "c*"
    for more in ({"type": "LoadBalancer"}, {"externalIPs": [places.external]}):
        cluster.service(**spec, **more)
        assert cluster.outcome_of("client", at(places.balancer, 80)) == "dropped"


def test_services_that_are_skipped(cluster: SliceCluster, places: Places) -> None:
    """Headless and ExternalName are not served, not even by a VIP of theirs (1.2)."""
    balanced: dict[str, Any] = {"ingress": [{"ip": places.balancer}]}
    cluster.service(**balanced)
    cluster.slice("x", cluster.one("c"))
    assert cluster.outcome_of("client", at(places.balancer, 80)) == "c*"
    for spec in ({"type": "ExternalName"}, {"clusterIP": "None", "clusterIPs": ["None"]}):
        cluster.service(**balanced | spec)
        assert cluster.outcome_of("client", at(places.balancer, 80)) == "left alone"
        assert cluster.met() == "dropped"


def test_claimed_twice(cluster: SliceCluster, places: Places) -> None:
    """If two Services claim one external IP and port, the older one keeps it until it goes (4)."""
    cluster.claim("a", NEW, places.cluster_ip)
    cluster.endpoints("a", name="a")
    assert cluster.outcome_of("client", at(places.external, 80)) == "a"
    cluster.claim("web", OLD, places.unallocated)
    cluster.endpoints("c")
    assert cluster.outcome_of("client", at(places.external, 80)) == "c*"
    assert cluster.met() == "a"
    cluster.withdraw()
    assert cluster.outcome_of("client", at(places.external, 80)) == "a"
