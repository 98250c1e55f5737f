# SPDX-License-Identifier: Apache-2.0
"""The kernel's netfilter on this node: NAT, conntrack, and the rules of all programs.

The netfilter engine, an nft table of ebpflb's own (reference: docs/architecture.md):

rules        the sets, chains and rules of the table
elements     the elements of its maps: the endpoint of each backend's id
table        creates and compares the table; the table that keeps NAT working meanwhile
transaction  changes of a table that are made all at once
probe        whether the kernel translates by such a table
arrivals     whether requests reach netfilter from a device with the choice of the program there
watch        puts the table back when others remove it
flowtable    the kernel's flowtable (--fast-forward)

The state of netfilter as other programs left it:

conntrack    the entries of conntrack, listed and deleted
nft          nftables tables, by netlink
iptables     chains and rules, by iptables' own tools and of iptables-legacy
firewall_rules   firewall rules in one form, whichever tool printed them
firewall_reader  reads the firewall rules of a network namespace
each_packet  which rules act on each packet of a connection (--fast-forward=auto)
untracked    what rules in raw exempt from conntrack, and so from ebpflb
"""
