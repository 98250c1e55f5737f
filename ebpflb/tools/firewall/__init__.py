# SPDX-License-Identifier: Apache-2.0
"""The effects of ebpflb on the firewall rules of this node, read literally (docs/firewalls.md).

survey      reads the rules; which of them act on each packet of a connection
named       which rules name a Service and may not match requests to it
forwarding  whether FORWARD drops traffic that only kube-proxy's rules accept
rules       tables, chains and rules, in the words of iptables-save
read_nft    reads the output of nft -j
"""
