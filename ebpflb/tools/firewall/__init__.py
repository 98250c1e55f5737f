# SPDX-License-Identifier: Apache-2.0
"""The effects of ebpflb on the firewall rules of this node, read literally (docs/firewalls.md).

survey      compares the rules with the Services; which rules act on each packet of a connection
forwarding  whether FORWARD drops traffic that only kube-proxy's rules accept
rules       tables, chains and rules in one form
read        makes them from the output of iptables-save and nft
"""
