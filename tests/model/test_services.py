# SPDX-License-Identifier: Apache-2.0
"""The service ports of a Service, and the content of each (kube-proxy.md 1)."""

import re
from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from ebpflb.errors import InvalidObject
from ebpflb.model import services
from ebpflb.model.addresses import Family
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Removed
from ebpflb.model.services import Admission, PortName, Protocol
from tests.model import builders


def ips(*listed: str) -> tuple[Any, ...]:
    return tuple(map(ip_address, listed))


@pytest.mark.parametrize("value", ["", "other-proxy"])
def test_another_proxys_service(value: str) -> None:
    """The label's presence hands a Service to another proxy; its value is irrelevant (1.1)."""
    service = builders.service(labels={services.PROXY_NAME_LABEL: value})
    assert not services.is_ours(service)
    assert services.parse(service) == ((), ())


@pytest.mark.parametrize(
    "spec",
    [
        {"clusterIP": "None", "clusterIPs": ["None"]},
        {"clusterIP": "None", "clusterIPs": ["None"], "ports": []},
        {"type": "ExternalName"},
    ],
    ids=["headless", "headless without ports", "ExternalName with an IP"],
)
def test_headless_services_have_no_service_port(spec: dict[str, Any]) -> None:
    """Headless and ExternalName services have no service port (1.2)."""
    service = builders.service(**spec)
    assert not services.is_ours(service)
    assert services.parse(service) == ((), ())


def test_a_manifest_without_cluster_ip() -> None:
    """A manifest without a cluster IP has no service port (1.2), and a warning.

    The API server would have assigned one.
    """
    ports, (warning,) = services.parse(builders.service(clusterIP="", clusterIPs=[]))
    assert ports == () and warning.startswith("spec.clusterIP: missing, so it is not served")
    alias = builders.service(clusterIP="", clusterIPs=[], type="ExternalName")
    assert services.parse(alias) == ((), ())


def test_a_manifest_without_node_port() -> None:
    """Without a node port the cluster IP is served, and a remark says so.

    A load balancer needs no node port.
    """
    without = [{"name": "http", "port": 80}]
    ports, (warning,) = services.parse(builders.service(type="NodePort", ports=without))
    assert [port.node_port for port in ports] == [0] * len(ports) and ports
    assert warning.startswith("spec.ports[0].nodePort: missing")
    assert services.parse(builders.service(type="LoadBalancer", ports=without)).warnings == ()


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"ipFamilies": ["IPv4"], "clusterIPs": ["10.0.0.1"]}, {4: "10.0.0.1"}),
        ({"ipFamilies": ["IPv6"], "clusterIPs": ["fd00::1"]}, {6: "fd00::1"}),
        (
            {"ipFamilies": ["IPv6", "IPv4"], "clusterIPs": ["fd00::1", "10.0.0.1"]},
            {6: "fd00::1", 4: "10.0.0.1"},
        ),
        ({"ipFamilies": ["IPv4"] * 2, "clusterIPs": ["10.0.0.1", "10.0.0.2"]}, {4: "10.0.0.1"}),
        ({"ipFamilies": None, "clusterIPs": None, "clusterIP": "10.0.0.1"}, {4: "10.0.0.1"}),
        ({"ipFamilies": [], "clusterIPs": None, "clusterIP": "fd00::1"}, {6: "fd00::1"}),
    ],
    ids=["IPv4", "IPv6", "both", "the first counts", "clusterIP alone", "IPv6 clusterIP alone"],
)
def test_cluster_ips_match_ip_families(spec: dict[str, Any], found: dict[int, str]) -> None:
    """clusterIPs is paired with ipFamilies; clusterIP is used only without clusterIPs (1.3)."""
    parsed = services.parse(builders.service(**spec))
    assert {port.name.family: str(port.cluster_ip) for port in parsed.ports} == found
    assert not parsed.warnings


def test_missing_cluster_ip() -> None:
    """A family without its clusterIP has no service port, and a warning (1.3)."""
    parsed = services.parse(builders.service(ipFamilies=["IPv4", "IPv6"]))
    assert [port.name.family for port in parsed.ports] == [Family.IPV4]
    assert parsed.warnings == ("spec.clusterIPs[1]: missing, so nothing is served by IPv6",)


def test_unpaired_cluster_ips() -> None:
    """Without ipFamilies a second clusterIP is unused, with a warning."""
    parsed = services.parse(builders.dual_stack(ipFamilies=None))
    assert [port.name.family for port in parsed.ports] == [Family.IPV4]
    assert parsed.warnings == ("spec.ipFamilies: empty, so only spec.clusterIP is used",)


def test_every_port_in_every_family() -> None:
    """Identity is namespace, name, port name and protocol, per family; "" is a port name (1.4)."""
    ports = [{"port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53}]
    parsed = services.parse(builders.dual_stack(ports=ports))
    assert [port.name for port in parsed.ports] == [
        PortName("shop", "web", "", Protocol.UDP, Family.IPV4),
        PortName("shop", "web", "dns-tcp", Protocol.TCP, Family.IPV4),
        PortName("shop", "web", "", Protocol.UDP, Family.IPV6),
        PortName("shop", "web", "dns-tcp", Protocol.TCP, Family.IPV6),
    ]


def test_names_as_people_write_them() -> None:
    """A service port is called namespace/service:port, without the colon if the port has no
    name.
    """
    assert str(builders.port_name("http")) == "shop/web:http"
    assert str(builders.port_name()) == "shop/web"


def test_addresses_go_to_their_family() -> None:
    """Each family uses only its own external IPs, load balancer IPs and source ranges (1.3)."""
    service = builders.dual_stack(
        type="LoadBalancer",
        ports=[{"port": 80, "nodePort": 30080}],
        externalIPs=["192.0.2.1", "2001:db8::1"],
        loadBalancerSourceRanges=["203.0.113.0/24", "2001:db8:5::/48"],
        ingress=[{"ip": "198.51.100.1"}, {"ip": "2001:db8::2"}],
    )
    four, six = services.parse(service).ports
    assert (four.external_ips, six.external_ips) == (ips("192.0.2.1"), ips("2001:db8::1"))
    assert (four.load_balancer_ips, six.load_balancer_ips) == (
        ips("198.51.100.1"),
        ips("2001:db8::2"),
    )
    assert four.source_ranges == (ip_network("203.0.113.0/24"),)
    assert six.source_ranges == (ip_network("2001:db8:5::/48"),)
    assert four.node_port == six.node_port == 30080


def test_external_ips_switched_off() -> None:
    """The gate AllowServiceExternalIPs removes only their addresses (1.4)."""
    spec: dict[str, Any] = {"externalIPs": ["192.0.2.1", "x"], "externalTrafficPolicy": "Local"}
    service = builders.service(**spec, ingress=[{"ip": "198.51.100.1"}])
    (port,), warnings = services.parse(service, Admission(serve_external_ips=False))
    assert (port.external_ips, port.load_balancer_ips) == ((), ips("198.51.100.1"))
    assert port.external_local and not warnings
    cluster = ClusterState("here", admission=Admission(serve_external_ips=False))
    key = Key("shop", "web")
    assert not cluster.apply(Changed(Kind.SERVICE, key, ReadObject(service, "test.yaml"))).warnings
    assert cluster.services[key] == (port,)


def test_external_ips_that_are_not_allowed() -> None:
    """External IPs outside --external-ips are not served, but named; policies and VIPs stay."""
    spec: dict[str, Any] = {
        "externalIPs": ["192.0.2.1", "203.0.113.1", "203.0.113.2"],
        "externalTrafficPolicy": "Local",
    }
    service = builders.service(**spec, ingress=[{"ip": "203.0.113.9"}])

    def parse(text: str) -> services.ParsedService:
        return services.parse(service, Admission(external_ips=services.parse_external_ips(text)))

    (port,), warnings = parse("192.0.2.0/24,2001:db8::/32")
    assert port.external_ips == ips("192.0.2.1")
    assert port.external_local and port.load_balancer_ips == ips("203.0.113.9")
    assert warnings == tuple(
        f"spec.externalIPs: {ip} is not served: --external-ips=192.0.2.0/24,2001:db8::/32"
        for ip in ("203.0.113.1", "203.0.113.2")
    )
    (port,), warnings = parse("none")
    assert port.external_ips == () and len(warnings) == 3
    (port,), warnings = parse("all")
    assert len(port.external_ips) == 3 and not warnings


def test_external_ips_are_named_once() -> None:
    """Each Service and address gets one line, and another line only if it was served in between."""
    cluster = ClusterState("here", admission=Admission(external_ips=services.NO_EXTERNAL_IPS))
    key = Key("shop", "web")

    def texts(*ips: str) -> list[str]:
        service = ReadObject(builders.service(externalIPs=list(ips)), "test.yaml")
        return [str(each) for each in cluster.apply(Changed(Kind.SERVICE, key, service)).warnings]

    (line,) = texts("192.0.2.1")
    assert "shop/web" in line and "192.0.2.1 is not served" in line
    assert not texts("192.0.2.1")
    (line,) = texts("192.0.2.1", "192.0.2.2")
    assert "192.0.2.2" in line
    assert not texts()
    assert len(texts("192.0.2.1")) == 1
    cluster.apply(Removed(Kind.SERVICE, key))
    assert len(texts("192.0.2.1")) == 1


SPECIAL = {
    "0.0.0.0": "an unspecified address",
    "::": "an unspecified address",
    "::ffff:0.0.0.0": "an unspecified address",
    "000.0.0.000": "an unspecified address",
    "127.0.0.1": "a loopback address",
    "127.9.8.7": "a loopback address",
    "::1": "a loopback address",
    "::ffff:127.0.0.1": "a loopback address",
    "169.254.169.254": "a link-local address",
    "fe80::1": "a link-local address",
    "::ffff:169.254.0.1": "a link-local address",
    "224.0.0.1": "a multicast address",
    "239.1.2.3": "a multicast address",
    "ff02::1": "a multicast address",
    "::ffff:224.0.0.1": "a multicast address",
}


@pytest.mark.parametrize(("text", "what"), SPECIAL.items())
def test_special_addresses_are_not_served(text: str, what: str) -> None:
    """Special addresses are not served as external or load balancer IPs, but named."""
    service = builders.dual_stack(
        externalIPs=["192.0.2.1", text], ingress=[{"ip": text}, {"ip": "198.51.100.1"}]
    )
    (four, six), warnings = services.parse(service)
    assert (four.external_ips, six.external_ips) == (ips("192.0.2.1"), ())
    assert (four.load_balancer_ips, six.load_balancer_ips) == (ips("198.51.100.1"), ())
    reason = f'"{text}" is {what}, which a Service may not have'
    assert warnings == (
        f"spec.externalIPs[1]: {reason}",
        f"status.loadBalancer.ingress[0].ip: {reason}",
    )


@pytest.mark.parametrize(("text", "what"), SPECIAL.items())
def test_special_cluster_ips_are_invalid(text: str, what: str) -> None:
    """A manifest may have a special cluster IP; the last good state of its Service stays."""
    families: dict[str, Any] = {"ipFamilies": None, "clusterIP": text, "clusterIPs": [text]}
    with pytest.raises(InvalidObject, match=re.escape(f'spec.clusterIP: "{text}" is {what}')):
        services.parse(builders.service(**families))


def test_no_cluster_ip_no_service() -> None:
    """A family without a cluster IP has no service port, even if it has other addresses (1.3)."""
    port = builders.only_port(builders.service(externalIPs=["2001:db8::1"]))
    assert port.name.family is Family.IPV4
    assert not port.externally_accessible


def test_ip_mode() -> None:
    """An ingress entry is served only with an IP and mode VIP, the default, whatever the Service's
    type (1.4).
    """
    ingress = [
        {"ip": "198.51.100.1"},
        {"ip": "198.51.100.2", "ipMode": "VIP"},
        {"ip": "198.51.100.3", "ipMode": "Proxy"},
        {"hostname": "lb.example.org"},
        {"ip": ""},
    ]
    parsed = services.parse(builders.service(type="ClusterIP", ingress=ingress))
    assert parsed.ports[0].load_balancer_ips == ips("198.51.100.1", "198.51.100.2")
    assert not parsed.warnings


@pytest.mark.parametrize(
    ("ranges", "kept"),
    [
        ([" 203.0.113.0/24", "10.0.0.0/8 "], ["203.0.113.0/24", "10.0.0.0/8"]),
        (["203.0.113.000/025"], ["203.0.113.0/25"]),
        (["203.0.113.7/24", "203.0.113.0/24"], ["203.0.113.0/24"]),
        (["203.0.113.0/24", "0.0.0.0/0"], []),
        (["203.0.113.0/24", "::/0"], ["203.0.113.0/24"]),
        (["2001:db8::/32"], []),
        (["", "  "], []),
    ],
    ids=["blanks", "sloppy", "twice", "everyone", "everyone else", "other family", "empty"],
)
def test_source_ranges(ranges: list[str], kept: list[str]) -> None:
    """Blanks are removed; /0, or no range of this family, means no restriction (1.4)."""
    parsed = services.parse(builders.service(loadBalancerSourceRanges=ranges))
    assert parsed.ports[0].source_ranges == tuple(map(ip_network, kept))
    assert not parsed.warnings


def test_unreadable_entries_are_skipped_with_a_remark() -> None:
    """An entry that kube-proxy skips with a log line is skipped and named.

    Blank entries are not named.
    """
    parsed = services.parse(
        builders.service(
            externalIPs=["192.0.2.1", "x", " ", " 192.0.2.2", "192.0.2.01"],
            loadBalancerSourceRanges=["10.0.0.0/33", "10.0.0.0/8"],
            ingress=[{"ip": "198.51.100"}],
        )
    )
    (port,) = parsed.ports
    assert port.external_ips == ips("192.0.2.1")
    assert port.load_balancer_ips == ()
    assert port.source_ranges == (ip_network("10.0.0.0/8"),)
    assert parsed.warnings == (
        'spec.externalIPs[1]: "x" is not an IP address',
        'spec.externalIPs[3]: " 192.0.2.2" is not an IP address',
        'status.loadBalancer.ingress[0].ip: "198.51.100" is not an IP address',
        'spec.loadBalancerSourceRanges[0]: "10.0.0.0/33" is not a CIDR such as 10.0.0.0/8',
    )


def test_a_service_with_too_many_entries() -> None:
    """The first 1000 entries of each list are served; the first port has a warning that says so."""
    many = services.MOST_PORTS + 1
    ports = [{"name": f"p{number}", "port": number} for number in range(1, many + 1)]
    addresses = [f"203.0.{number >> 8}.{number & 255}" for number in range(many)]
    ranges = [f"10.{number >> 8}.{number & 255}.0/24" for number in range(many)]
    found, warnings = services.parse(
        builders.service(
            ports=ports,
            type="LoadBalancer",
            externalIPs=addresses,
            ingress=[{"ip": address} for address in addresses],
            loadBalancerSourceRanges=ranges,
            annotations={"ebpflb.io/nodeport-source-ranges": ",".join(ranges)},
        )
    )
    assert [port.port for port in found] == list(range(1, many))
    assert {len(port.external_ips) for port in found} == {1000}
    assert {len(port.load_balancer_ips) for port in found} == {1000}
    assert len({id(port.external_ips) for port in found}) == 1, "all ports share the addresses"
    assert {len(port.source_ranges) for port in found} == {1000}
    assert {len(port.nodeport_source_ranges) for port in found} == {1000}
    assert [it.partition(":")[0] for it in warnings] == [
        "spec.externalIPs",
        "status.loadBalancer.ingress",
        "spec.loadBalancerSourceRanges",
        "metadata.annotations[ebpflb.io/nodeport-source-ranges]",
        "spec.ports",
    ]
    assert warnings[-1] == "spec.ports: too many: the first 1000 of 1001 are used"
    assert [port.limit for port in found] == [warnings[0], *[""] * 999]


def test_equal_lists_stay_the_same_objects() -> None:
    """A version with the same addresses and ranges shares the former lists, so it is compared
    quickly.
    """
    spec: dict[str, Any] = {
        "externalIPs": ["192.0.2.1"],
        "ingress": [{"ip": "198.51.100.1"}],
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
    }
    (former,) = services.parse(builders.service(**spec)).ports
    (port,) = services.parse(builders.service(**spec), former=(former,)).ports
    assert port.external_ips is former.external_ips
    assert port.load_balancer_ips is former.load_balancer_ips
    assert port.source_ranges is former.source_ranges
    (other,) = services.parse(builders.service(externalIPs=["192.0.2.2"]), former=(former,)).ports
    assert other.external_ips == ips("192.0.2.2")


def test_few_of_many_warnings_are_kept() -> None:
    """An object may have an error in each of its entries: few warnings are kept, those about limits
    first.
    """
    found = services.parse(builders.service(externalIPs=["x"] * 1001))
    assert found.warnings[0] == "spec.externalIPs: too many: the first 1000 of 1001 are used"
    assert found.warnings[1] == 'spec.externalIPs[0]: "x" is not an IP address'
    assert (len(found.warnings), found.warnings[-1]) == (21, "and 981 more")


@pytest.mark.parametrize(
    ("field", "made"),
    [
        ("metadata.namespace", lambda name: builders.service(namespace=name)),
        ("metadata.name", lambda name: builders.service(name=name)),
        ("spec.ports[0].name", lambda it: builders.service(ports=[{"name": it, "port": 80}])),
    ],
)
def test_names_that_no_map_holds_are_invalid(field: str, made: Callable[[str], Any]) -> None:
    """Longer names are invalid: Kubernetes limits names to 63 characters, so only a manifest may
    exceed this.
    """
    assert services.parse(made("x" * 63)).ports
    with pytest.raises(InvalidObject, match=re.escape(f"{field}: longer than 63 characters")):
        services.parse(made("x" * 64))
