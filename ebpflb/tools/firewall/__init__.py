# SPDX-License-Identifier: Apache-2.0
"""What ebpflb changes for the firewall rules of this node, read plainly (docs/firewalls.md).

survey           reads the rules of the node and of its pods, and answers (a) and (b)
missed           (a) which rules name a Service and may not match requests to it
forwarding       (c) whether FORWARD drops what nothing but kube-proxy's rules accepts
rules            tables, chains and rules, in the words of iptables-save
read_iptables    reads what iptables-save prints, with ipsets
read_nft         reads what nft -j prints
"""
