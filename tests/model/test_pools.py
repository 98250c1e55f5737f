# SPDX-License-Identifier: Apache-2.0
"""Pools as the operator writes them, and what Services ask of them."""

from ipaddress import ip_address
from typing import Any

import msgspec
import pytest

from ebpflb.model.addresses import Family
from ebpflb.model.objects import Service
from ebpflb.model.pools import CLASS, Claim, parse_pools, read_claim, show_pools


@pytest.mark.parametrize(
    ("text", "has", "lacks"),
    [
        ("192.0.2.200-192.0.2.250", "192.0.2.200 192.0.2.250", "192.0.2.199 192.0.2.251 ::1"),
        ("192.0.2.0/30", "192.0.2.1 192.0.2.2", "192.0.2.0 192.0.2.3"),
        ("192.0.2.8/31", "192.0.2.8 192.0.2.9", "192.0.2.10"),
        ("192.0.2.7/32", "192.0.2.7", "192.0.2.6 192.0.2.8"),
        ("2001:db8::/120", "2001:db8::1 2001:db8::ff", "2001:db8:: 2001:db8::100"),
        ("192.0.2.5,2001:db8::5", "192.0.2.5 2001:db8::5", "192.0.2.6 2001:db8::6"),
    ],
)
def test_a_pool_has_the_addresses_that_hosts_may_have(text: str, has: str, lacks: str) -> None:
    """A network's own address and its broadcast address are no host's."""
    (pool,) = parse_pools((text,))
    assert all(ip_address(each) in pool for each in has.split())
    assert not any(ip_address(each) in pool for each in lacks.split())
    assert parse_pools((show_pools((pool,)),)) == (pool,)


def test_a_pool_is_for_namespaces_with_its_labels() -> None:
    everyone, red = parse_pools(("192.0.2.1", "192.0.2.2@team=red,stage in (a,b)"))
    assert everyone.serves({}) and not red.serves({})
    assert red.serves({"team": "red", "stage": "b"}) and not red.serves({"team": "red"})
    assert str(red) == "192.0.2.2@team=red,stage in (a,b)"


@pytest.mark.parametrize(
    "text",
    [
        *("", "192.0.2.9-192.0.2.1", "192.0.2.1-2001:db8::1", "127.0.0.1", "fe80::/64", "x"),
        *("192.0.2.1@", "192.0.2.1@a=b=c", "224.0.0.0/24", "192.0.2.1-"),
    ],
)
def test_what_is_no_pool_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_pools((text,))


def service(annotations: dict[str, str] | None = None, **spec: Any) -> Service:
    metadata = {"name": "web", "namespace": "shop", "uid": "u", "annotations": annotations}
    spec = {"type": "LoadBalancer", "loadBalancerClass": CLASS, "clusterIP": "10.0.0.1"} | spec
    return msgspec.convert({"metadata": metadata, "spec": spec}, Service)


def claim(annotations: dict[str, str] | None = None, **spec: Any) -> Claim:
    found = read_claim(service(annotations, **spec))
    assert found
    return found


@pytest.mark.parametrize("spec", [{"loadBalancerClass": "x/y"}, {"type": "ClusterIP"}])
def test_services_of_other_classes_and_types_are_left_alone(spec: dict[str, Any]) -> None:
    assert read_claim(service(**spec)) is None


@pytest.mark.parametrize(
    "prefix", ["ebpflb.io", "metallb.io", "metallb.universe.tf", "kube-vip.io"]
)
def test_a_service_asks_as_it_would_ask_metallb_or_kube_vip(prefix: str) -> None:
    word = {"ebpflb.io": "load-balancer-ips", "kube-vip.io": "loadbalancerIPs"}
    name = f"{prefix}/{word.get(prefix, 'loadBalancerIPs')}"
    found = claim({name: "192.0.2.9, 2001:db8::9"}, loadBalancerIP="192.0.2.1")
    assert [*map(str, found.wanted)] == ["192.0.2.9", "2001:db8::9"]


def test_the_field_counts_without_an_annotation() -> None:
    found = claim({"metallb.io/allow-shared-ip": "dns"}, loadBalancerIP="192.0.2.1")
    assert (found.wanted, found.sharing) == ((ip_address("192.0.2.1"),), "dns")
    assert claim(ipFamilies=["IPv6", "IPv4"]).families == (Family.IPV6, Family.IPV4)


@pytest.mark.parametrize("text", ["x", "192.0.2.1,192.0.2.2", "127.0.0.1", "a,b,c,d"])
def test_an_unreadable_wish_is_named_by_its_field(text: str) -> None:
    assert "spec.loadBalancerIP" in claim(loadBalancerIP=text).problem
