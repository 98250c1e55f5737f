# SPDX-License-Identifier: Apache-2.0
"""What this node's firewall rules do to the traffic of Services (docs/firewalls.md).

survey      which rules drop requests to Services, and which act on each packet of a connection
forwarding  whether FORWARD drops traffic that only kube-proxy's rules accept
walk        what the rules of a hook do with a packet

The rules are read by ebpflb.kernel.netfilter.firewall.
"""
