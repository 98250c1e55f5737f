# SPDX-License-Identifier: Apache-2.0
"""Settings of operators and CNIs with which a load balancer must work; each counts packets.

Each function takes a node. ``touched`` tells how many packets the rules have dropped or
masqueraded.
"""

import json
import subprocess

from ebpflb.lab import cni
from ebpflb.lab.hosts import Host

V4, V6 = cni.NETWORKS


def strict_reverse_path(node: Host) -> None:
    """Set rp_filter=1 on all devices; for IPv6 add firewalld's rule instead."""
    for device in ("all", "default"):
        node.sysctl(f"net.ipv4.conf.{device}.rp_filter", 1)
    node.nft("""
        table ip6 reverse {
            counter strayed {}
            chain prerouting {
                type filter hook prerouting priority raw;
                icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit } accept
                fib saddr . iif oif missing counter name strayed drop
            }
        }""")


def drop_invalid(node: Host) -> None:
    """Drop ``ct state invalid`` at every hook; ICMP redirects may be invalid."""
    for hook in ("input", "forward", "output"):
        node.nft(f"""
            table inet tracked {{
                counter invalid {{}}
                chain {hook} {{
                    type filter hook {hook} priority 0
                    icmpv6 type nd-redirect accept
                    icmp type redirect accept
                    ct state invalid counter name invalid drop
                }}
            }}""")


def drop_forwarded(node: Host) -> None:
    """Forward only known connections, and pods' packets, which the CNI accepts."""
    node.nft(f"""
        table inet forwarding {{
            counter unwanted {{}}
            chain forward {{
                type filter hook forward priority 1; policy drop;
                ct state established,related accept
                ip saddr {V4} accept
                ip daddr {V4} accept
                ip6 saddr {V6} accept
                ip6 daddr {V6} accept
                ip6 nexthdr icmpv6 accept
                counter name unwanted
            }}
        }}""")


def masquerade_pods(node: Host) -> None:
    """Masquerade pods' packets to other hosts as the node, as a CNI does."""
    node.nft(f"""
        table inet cni {{
            counter masked {{}}
            chain postrouting {{
                type nat hook postrouting priority srcnat;
                ip saddr {V4} ip daddr != {V4} counter name masked masquerade
                ip6 saddr {V6} ip6 daddr != {V6} counter name masked masquerade
            }}
        }}""")


def filter_bridged(node: Host) -> None:
    """Load br_netfilter: bridged packets pass the packet filter too."""
    for table in ("iptables", "ip6tables"):
        node.sysctl(f"net.bridge.bridge-nf-call-{table}", 1)


EVERYTHING = (strict_reverse_path, drop_invalid, drop_forwarded, masquerade_pods, filter_bridged)


def touched(node: Host) -> dict[str, int]:
    """Return the number of packets since the last call, for each rule that counted some."""
    process = node.start(["nft", "-j", "reset", "counters"], stdout=subprocess.PIPE)
    said, _ = process.communicate()
    counters = (it["counter"] for it in json.loads(said)["nftables"] if "counter" in it)
    return {it["name"]: it["packets"] for it in counters if it["packets"]}
