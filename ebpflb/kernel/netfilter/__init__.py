# SPDX-License-Identifier: Apache-2.0
"""What the kernel's netfilter does for this node: NAT, conntrack, and the rules of all programs.

The engine netfilter, an nft table of ebpflb's own (reference: docs/architecture.md):

rules        the sets, chains and rules of the table
elements     the elements of its maps: the endpoint of each backend's id
table        makes the table and compares it; the table that keeps NAT at work meanwhile
transaction  changes of a table that are made all at once
probe        whether the kernel translates by such a table
watch        puts the table back when others remove it
flowtable    the kernel's flowtable (--fast-forward)

What others made of it:

conntrack    the entries of conntrack, listed and deleted
rulesets     all rules of netfilter, as nft and iptables print them
nft          nft's tables, by the tool nft
iptables     chains and rules, by iptables' own tools and of iptables-legacy
"""
