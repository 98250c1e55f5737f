# SPDX-License-Identifier: Apache-2.0
"""What kube-proxy would write for a list of Services on one node, in each of its modes.

Its shapes of 1.36 with --cluster-cidr, --nodeport-addresses=primary and traffic policy Cluster
everywhere: external addresses are masqueraded always, cluster IPs for others than pods
(kube-proxy.md 4.2, 5.1), unknown ports of cluster IPs refused and unknown cluster IPs dropped by
nft alone (6.3), hairpins per endpoint by iptables and for those here by nft (5.1).
From 1.36 on nft's service chains translate at once; before, they went to a chain an endpoint.
There are more than 1,000 endpoints, so iptables rules carry no comment (16.5). The chains for
services without endpoints and for source ranges are there and empty, as they would be. In mode
ipvs there are virtual servers at cluster IPs, which a device has, and at NodePorts; rules ask
ipsets what to masquerade.
"""

import hashlib
from base64 import b32encode
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bench.services import CIDR, CIDR6, PORT, TARGET, NodePort

MARK = "0x4000"
IPVS_DEVICE = "kube-ipvs0"

_NFT = """
table {ip} kube-proxy {{
  set cluster-ips {{ type {type}; elements = {{ {cluster_ips} }}; }}
  set nodeport-ips {{ type {type}; elements = {{ {node} }}; }}
  set hairpin-connections {{
    type {type} . {type} . inet_proto . inet_service; {hairpins}
  }}
  map firewall-ips {{ type {type} . inet_proto . inet_service : verdict; }}
  map no-endpoint-services {{ type {type} . inet_proto . inet_service : verdict; }}
  map no-endpoint-nodeports {{ type inet_proto . inet_service : verdict; }}
  map service-ips {{
    type {type} . inet_proto . inet_service : verdict; elements = {{ {service_ips} }};
  }}
  map service-nodeports {{
    type inet_proto . inet_service : verdict; elements = {{ {nodeports} }};
  }}
  chain filter-prerouting-pre-dnat {{
    type filter hook prerouting priority -110
    ct state new jump firewall-check
  }}
  chain filter-output-pre-dnat {{
    type filter hook output priority -110
    ct state new jump firewall-check
  }}
  chain filter-input {{
    type filter hook input priority 0
    ct state new jump nodeport-endpoints-check
    ct state new jump service-endpoints-check
  }}
  chain filter-forward {{
    type filter hook forward priority 0
    ct state new jump service-endpoints-check
    ct state new jump cluster-ips-check
  }}
  chain filter-output {{
    type filter hook output priority 0
    ct state new jump service-endpoints-check
    ct state new jump cluster-ips-check
  }}
  chain nat-prerouting {{
    type nat hook prerouting priority -100
    jump services
  }}
  chain nat-output {{
    type nat hook output priority -100
    jump services
  }}
  chain nat-postrouting {{
    type nat hook postrouting priority 100
    jump masquerading
  }}
  chain cluster-ips-check {{
    {ip} daddr @cluster-ips reject
    {ip} daddr {{ {cidr} }} drop
  }}
  chain firewall-check {{ {ip} daddr . meta l4proto . th dport vmap @firewall-ips; }}
  chain service-endpoints-check {{
    {ip} daddr . meta l4proto . th dport vmap @no-endpoint-services
  }}
  chain nodeport-endpoints-check {{
    {ip} daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports
  }}
  chain services {{
    {ip} daddr @cluster-ips {ip} saddr != {pods} mark set mark or {mark}
    {ip} daddr . meta l4proto . th dport vmap @service-ips
    {ip} daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
  }}
  chain masquerading {{
    mark and {mark} != 0 mark set mark xor {mark} masquerade fully-random
    ct status dnat {ip} saddr . {ip} daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random
  }}
{chains}
}}
"""  # noqa: E501

_FILTER = f"""*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A INPUT -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
-A FORWARD -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A FORWARD -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL
-A OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark {MARK}/{MARK} -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
"""

_NAT = f"""-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark ! --mark {MARK}/{MARK} -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark {MARK}
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --or-mark {MARK}"""
_NAT_CHAINS = ("KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ")


_IPVS_SETS = {
    "KUBE-CLUSTER-IP": "hash:ip,port",
    "KUBE-LOOP-BACK": "hash:ip,port,ip",
    "KUBE-LOAD-BALANCER": "hash:ip,port",
    "KUBE-EXTERNAL-IP": "hash:ip,port",
    "KUBE-EXTERNAL-IP-LOCAL": "hash:ip,port",
    "KUBE-IPVS-IPS": "hash:ip",
    "KUBE-NODE-PORT-TCP": "bitmap:port range 0-65535",
    "KUBE-NODE-PORT-UDP": "bitmap:port range 0-65535",
    "KUBE-HEALTH-CHECK-NODE-PORT": "bitmap:port range 0-65535",
}
_IPVS_RULES = f"""*filter
:KUBE-FORWARD - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
-A INPUT -j KUBE-IPVS-FILTER
-A INPUT -j KUBE-PROXY-FIREWALL
-A INPUT -j KUBE-NODE-PORT
-A FORWARD -j KUBE-PROXY-FIREWALL
-A FORWARD -j KUBE-FORWARD
-A OUTPUT -j KUBE-IPVS-OUT-FILTER
-A KUBE-FORWARD -m mark --mark {MARK}/{MARK} -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP-LOCAL dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
-A KUBE-NODE-PORT -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
COMMIT
*nat
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -s {{loopback}} -j RETURN
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst ! -s {{pods}} -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-NODE-PORT -p udp -m set --match-set KUBE-NODE-PORT-UDP dst -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark {MARK}/{MARK} -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark {MARK}
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --or-mark {MARK}
COMMIT
"""


def nft(them: list[NodePort], node: str, node_address: str, pods: str) -> str:
    """Return a table for `nft -f`, for the family of the node's address."""
    v6 = ":" in node_address
    ports = [(each, protocol) for each in them for protocol in each.protocols]
    hairpins = [
        f"{address} . {address} . {protocol} . {TARGET}"
        for each, protocol in ports
        for address, where in each.endpoints
        if where == node
    ]
    return _NFT.format(
        ip="ip6" if v6 else "ip",
        type="ipv6_addr" if v6 else "ipv4_addr",
        cluster_ips=_listed(each.address for each in them),
        node=node_address,
        hairpins=f"elements = {{ {_listed(hairpins)} }};" if hairpins else "",
        service_ips=_listed(
            f"{each.address} . {protocol} . {PORT} : goto service-{_chain(each, protocol)}"
            for each, protocol in ports
        ),
        nodeports=_listed(
            f"{protocol} . {each.number} : goto external-{_chain(each, protocol)}"
            for each, protocol in ports
        ),
        cidr=CIDR6 if v6 else CIDR,
        pods=pods,
        mark=MARK,
        chains="\n".join(_nft_chains(each, protocol) for each, protocol in ports),
    )


def nft_change(service: NodePort, protocol: str) -> str:
    """Return what `nft -f` is given when the service's endpoints have changed."""
    family = "ip6" if ":" in service.address else "ip"
    chain = f"{family} kube-proxy service-{_chain(service, protocol)}"
    target = f"meta l4proto {protocol} {_nft_target(service)}"
    return f"flush chain {chain}\nadd rule {chain} {target}\n"


def _listed(elements: Iterable[str]) -> str:
    return ", ".join(elements)


def _chain(service: NodePort, protocol: str) -> str:
    return f"{_hash(service.name, protocol)[:8]}-default/{service.name}/{protocol}/{protocol}"


def _nft_chains(service: NodePort, protocol: str) -> str:
    chain = _chain(service, protocol)
    return f"""  chain service-{chain} {{ meta l4proto {protocol} {_nft_target(service)}; }}
  chain external-{chain} {{ mark set mark or {MARK}; goto service-{chain}; }}"""


def _nft_target(service: NodePort) -> str:
    if len(service.endpoints) == 1:
        return f"dnat to {_host_port(service.endpoints[0][0])}"
    there = (f"{i} : {address} . {TARGET}" for i, (address, _) in enumerate(service.endpoints))
    count = len(service.endpoints)
    family = "ip6" if ":" in service.address else "ip"
    return f"dnat {family} addr . port to numgen random mod {count} map {{ {_listed(there)} }}"


def _host_port(address: str, port: int = TARGET) -> str:
    """Return an address, an endpoint's by default, with its port, as in rules."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def iptables(them: list[NodePort], pods: str) -> str:
    """Return both tables for `iptables-restore`, or for ip6tables-restore if the addresses are
    IPv6. The rules for NodePorts come last, as required.
    """
    rules = [
        line
        for each in them
        for protocol in each.protocols
        for line in _rules(each, protocol, pods)
    ]
    clusters = [line for line in rules if line.startswith("-A KUBE-SERVICES")]
    others = [line for line in rules if not line.startswith("-A KUBE-SERVICES")]
    last = "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"
    found = dict.fromkeys([*_NAT_CHAINS, *(line.split()[1] for line in others)])
    chains = [f":{chain} - [0:0]" for chain in found]
    nat = ["*nat", *chains, _NAT, *clusters, last, *others, "COMMIT"]
    return _FILTER + "\n".join(nat) + "\n"


def _rules(service: NodePort, protocol: str, pods: str) -> Iterator[str]:
    own = _hash(service.name, protocol)
    to = f"-d {service.address} -p {protocol} -m {protocol} --dport {PORT}"
    yield f"-A KUBE-SERVICES {to} -j KUBE-SVC-{own}"
    outside = f"-p {protocol} -m {protocol} --dport {service.number}"
    yield f"-A KUBE-NODEPORTS {outside} -j KUBE-EXT-{own}"
    yield f"-A KUBE-EXT-{own} -j KUBE-MARK-MASQ"
    yield f"-A KUBE-EXT-{own} -j KUBE-SVC-{own}"
    yield f"-A KUBE-SVC-{own} ! -s {pods} {to} -j KUBE-MARK-MASQ"
    for number, (address, _) in enumerate(service.endpoints):
        left = len(service.endpoints) - number
        chance = f"-m statistic --mode random --probability {1 / left:.10f} " if left > 1 else ""
        endpoint = f"KUBE-SEP-{_hash(service.name, protocol, address)}"
        yield f"-A KUBE-SVC-{own} {chance}-j {endpoint}"
        yield f"-A {endpoint} -s {address} -j KUBE-MARK-MASQ"
        to_endpoint = f"DNAT --to-destination {_host_port(address)}"
        yield f"-A {endpoint} -p {protocol} -m {protocol} -j {to_endpoint}"


class Ipvs(NamedTuple):
    """Input of `ipset restore`, `iptables-restore`, `ipvsadm --restore`, and IPVS_DEVICE's
    addresses.
    """

    sets: str
    rules: str
    servers: str
    addresses: list[str]


def ipvs(them: list[NodePort], node: str, node_address: str, pods: str) -> Ipvs:
    """Return the mode ipvs for one family, with the scheduler rr, kube-proxy's default."""
    v6 = ":" in node_address
    start, family = ("KUBE-6-", " family inet6") if v6 else ("KUBE-", "")
    ports = [(each, protocol) for each in them for protocol in each.protocols]
    addresses = [each.address for each in them]
    sets = [f"create {name} {kind}" for name, kind in _IPVS_SETS.items()]
    sets = [f"{line}{family}" if " hash:" in line else line for line in sets]
    sets += [f"add KUBE-IPVS-IPS {address}" for address in addresses]
    servers = list[str]()
    for each, protocol in ports:
        sets.append(f"add KUBE-CLUSTER-IP {each.address},{protocol}:{PORT}")
        sets.append(f"add KUBE-NODE-PORT-{protocol.upper()} {each.number}")
        sets += [
            f"add KUBE-LOOP-BACK {address},{protocol}:{TARGET},{address}"
            for address, where in each.endpoints
            if where == node
        ]
        for where, number in ((each.address, PORT), (node_address, each.number)):
            kind = f"-{protocol[0]} {_host_port(where, number)}"
            servers.append(f"-A {kind} -s rr")
            servers += [f"-a {kind} -r {_host_port(it)} -m" for it, _ in each.endpoints]
    rules = _IPVS_RULES.format(pods=pods, loopback="::1" if v6 else "127.0.0.0/8")
    return Ipvs(
        "\n".join([*sets, ""]).replace(" KUBE-", f" {start}"),
        rules.replace("--match-set KUBE-", f"--match-set {start}"),
        "\n".join([*servers, ""]),
        addresses,
    )


def _hash(*words: str) -> str:
    """Return 16 letters and digits, as in kube-proxy's chains."""
    return b32encode(hashlib.sha256("/".join(words).encode()).digest()).decode()[:16]
