# SPDX-License-Identifier: Apache-2.0
"""What this machine is: its devices, sockets and sysctls, and what a kube-proxy does on it.

device_watch          its devices and their addresses, now and as they change
clients               who may ask for a service on it: namespaces by process, name, address and pod
routes                where it would route a packet
namespaces            its network namespaces, and work in each of them
sock_diag             sockets with a peer, and how one is ended
rulesets              all rules of its netfilter, as nft and iptables print them
poller                a check that is repeated, and reports when it fails and when it has recovered

What ebpflb sets on it:

conntrack          the sysctls of connection tracking that kube-proxy sets too
process            this process: its capabilities, OOM score and file limit
scratch_namespace  doctor's own namespaces, joined to it as pods are; they end with doctor

Its connection tracking and NAT:

ctnetlink           the entries of conntrack, listed and deleted
netlink_attributes  the contents of netlink messages
netfilter_rules     the sets, chains and rules of the engine netfilter's nft table
netfilter_table     makes that table, and compares it; the table that keeps NAT at work meanwhile
netfilter_elements  its elements: the endpoint of each backend's id
netfilter_probe     whether the kernel translates by such a table
nat_watch           puts that table back when others remove it
flowtable           the kernel's flowtable (--fast-forward)
nft_transaction     changes of a table that are made all at once

A kube-proxy on it:

kube_proxy_watch      is one running, or did one leave rules
kube_proxy_leftovers  all that one left, and its removal
iptables              its chains and rules, by iptables' own tools
nft                   its tables of nftables
listed_route_sources  the sources that routes would choose, by device
"""
