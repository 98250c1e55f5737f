# SPDX-License-Identifier: Apache-2.0
"""The effects of ebpflb on the firewall rules of this node, read literally (docs/firewalls.md).

survey      which rules drop requests to Services, and which act on each packet of a connection
forwarding  whether FORWARD drops traffic that only kube-proxy's rules accept
walk        what the rules of a hook do with a packet

The rules are read by ebpflb.kernel.netfilter.firewall.
"""
