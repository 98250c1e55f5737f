# SPDX-License-Identifier: Apache-2.0
"""The kernel's netfilter on this node: NAT, conntrack, and the rules of all programs.

The netfilter engine, an nft table of ebpflb's own (reference: docs/architecture.md):

elements     the elements of its maps: the endpoint of each backend's id
table        its rules; creates and compares it; the table that keeps NAT working meanwhile
probe        whether netfilter translates by such a table, and whether requests from a device reach
             it with the program's choice
watch        puts the table back when others remove it
flowtable    the kernel's flowtable (--fast-forward)
held_ports   masquerade ports in use, which no flow of the flow tables gets

The state of netfilter as other programs left it:

conntrack    the entries of conntrack, listed and deleted
nft          nftables tables, and changes of one that are made all at once
firewall     firewall rules in one form, read by whichever tool knows them
each_packet  which rules act on each packet of a connection (--fast-forward=auto),
             and whether the ways of open connections have changed
untracked    what rules in raw exempt from conntrack, and so from ebpflb; what rules drop that
             packets do not pass if they are handed over
"""
