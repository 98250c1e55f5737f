# SPDX-License-Identifier: Apache-2.0
"""The API servers that the cluster names are kept, and an outage never empties them."""

from ipaddress import ip_address
from typing import Any

import msgspec
import pytest

from ebpflb.lab import manifests
from ebpflb.model import objects
from ebpflb.model.annotations import HEALTH_OFF, HEALTH_PASSIVE
from ebpflb.model.api_servers import KeptApiServers
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Removed, Replaced
from ebpflb.model.facts import Fact
from ebpflb.model.services import API_SERVERS, KUBERNETES, Admission
from tests.model.builders import ports_of

IPS = ["10.96.0.1", "fd00:96::1"]
PORTS = [{"name": "https", "port": 443, "protocol": "TCP"}]
ONE, TWO, SIX = "192.0.2.1", "192.0.2.2", "2001:db8::1"
KEPT = KeptApiServers(((ONE, 6443), (SIX, 6443)))
KEEPING = Admission(keeps_api_servers=True)


def slice_of(*addresses: str, name: str = "kubernetes", **conditions: bool) -> Any:
    """Return a slice as the API servers write it: by default without conditions."""
    family = "IPv6" if ":" in "".join(addresses) else "IPv4"
    found: Any = manifests.endpoint_slice(
        "kubernetes", family, [], [{"name": "https", "port": 6443, "protocol": "TCP"}]
    )
    found["metadata"]["name"] = name
    found["endpoints"] = [{"addresses": [each], "conditions": conditions} for each in addresses]
    return found


def changed(manifest: Any) -> Changed:
    kind = Kind(manifest["kind"])
    type: Any = objects.Service if kind is Kind.SERVICE else objects.EndpointSlice
    key = Key(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
    return Changed(kind, key, ReadObject(msgspec.convert(manifest, type), "it"))


def serving(*slices: Any) -> ClusterState:
    made = ClusterState("node", admission=KEEPING)
    made.apply(changed(manifests.service("kubernetes", IPS, PORTS)))
    for each in slices:
        made.apply(changed(each))
    return made


def addresses(cluster: ClusterState) -> set[str]:
    kept = cluster.api_servers()
    return {address for address, _ in kept.endpoints} if kept else set()


def test_what_is_kept_is_what_was_received() -> None:
    made = serving(slice_of(ONE), slice_of(SIX, name="kubernetes-v6"))
    assert made.api_servers() == KEPT
    assert KEPT.urls == [f"https://{ONE}:6443", f"https://[{SIX}]:6443"]


@pytest.mark.parametrize("how", ["empty", "not ready", "removed", "not in the list"])
def test_an_outage_does_not_empty_them(how: str) -> None:
    """During an outage the last endpoint stays until another endpoint exists."""
    made = serving(slice_of(ONE))
    key = changed(slice_of(ONE)).key
    outages: dict[str, Any] = {
        "empty": changed(slice_of()),
        "not ready": changed(slice_of(ONE, ready=False)),
        "removed": Removed(Kind.ENDPOINT_SLICE, key),
        "not in the list": Replaced(Kind.ENDPOINT_SLICE, {}),
    }
    made.apply(outages[how])
    assert addresses(made) == {ONE}
    made.apply(changed(slice_of(TWO, name="another")))
    assert addresses(made) == {TWO}


@pytest.mark.parametrize(
    "text", [b'{"endpoints": [["x", 443]]}', b'{"endpoints": [["192.0.2.1", 65536]]}', b"{}"]
)
def test_a_damaged_file_is_an_error(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=KeptApiServers)


def test_all_is_off_unless_it_is_chosen() -> None:
    """Without the option an empty Service is refused, as with kube-proxy."""
    made = ClusterState("node")
    made.apply(changed(manifests.service("kubernetes", IPS, PORTS)))
    made.apply(changed(slice_of(ONE)))
    assert made.api_servers() is None
    made.apply(changed(slice_of()))
    assert not any(selection.has_any for _, selection in ports_of(made, KUBERNETES))


def test_their_health_is_watched_if_they_are_kept() -> None:
    """Endpoint health is on by default for this Service only; the annotation can change it."""
    made = serving()
    made.apply(changed(manifests.service("web", ["10.96.0.2"], PORTS)))
    health = {key: {port.endpoint_health for port in its} for key, its in made.services.items()}
    assert health == {KUBERNETES: {HEALTH_PASSIVE}, Key("default", "web"): {HEALTH_OFF}}
    off = {"ebpflb.io/endpoint-health": "off"}
    made.apply(changed(manifests.service("kubernetes", IPS, PORTS, annotations=off)))
    assert {port.endpoint_health for port in made.services[KUBERNETES]} == {HEALTH_OFF}


@pytest.mark.parametrize(("address", "of"), [("127.0.0.1", 4), ("::1", 6)])
def test_the_frontend_on_loopback_is_of_one_service_and_family(address: str, of: int) -> None:
    local = (ip_address(address), 7445)
    made = ClusterState("node", admission=Admission(local_api_server=local))
    others = [{"name": "other", "port": 444, "protocol": "TCP"}]
    for name, ports in (("kubernetes", [*PORTS, *others]), ("web", PORTS)):
        made.apply(changed(manifests.service(name, IPS, ports)))
    found = {port.name: port.loopback for ports in made.services.values() for port in ports}
    assert [name for name, it in found.items() if it] == [(*API_SERVERS, of)]
    assert set(found.values()) == {None, local}


WEB = Key("shop", "web")
PLACE = ip_address(ONE), 6443


def with_web(*slices: Any, **spec: Any) -> ClusterState:
    made = serving(*slices)
    port = {"name": "https", "port": 6443, "nodePort": 6443, "protocol": "TCP"}
    made.apply(changed(manifests.service("web", IPS, [port], namespace="shop", **spec)))
    made.take_changed_services()
    return made


def test_services_at_the_place_of_an_api_server_are_planned_again() -> None:
    """A Service with that port as its NodePort is planned again when this node gets the address."""
    for made, own in ((with_web(externalIPs=[ONE]), False), (with_web(type="NodePort"), True)):
        made.observe(Fact.REACHED_SERVERS, frozenset({PLACE}))
        made.observe(Fact.OWN_ADDRESSES, frozenset({ip_address(TWO)}))
        assert (WEB in made.take_changed_services()) is not own
        made.observe(Fact.OWN_ADDRESSES, frozenset({PLACE[0]}))
        assert WEB in made.take_changed_services()
        made.observe(Fact.REACHED_SERVERS, frozenset())
        assert WEB in made.take_changed_services() and not made.api_places.taken


def test_the_last_known_api_servers_keep_their_places() -> None:
    """An earlier agent's servers keep their places until other servers are listed, even after an
    empty slice.
    """
    made = with_web(externalIPs=[ONE])
    made.set_former_servers(frozenset({(ip_address(TWO), 6443)}))
    assert made.api_places.servers == {(ip_address(TWO), 6443)}
    made.apply(changed(slice_of(ONE)))
    assert made.api_places.servers == {PLACE} and WEB in made.take_changed_services()
    made.apply(Removed(Kind.ENDPOINT_SLICE, Key("default", "kubernetes")))
    assert made.api_places.servers == {PLACE}
