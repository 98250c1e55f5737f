# SPDX-License-Identifier: Apache-2.0
"""What this machine is, and what else has a hand in its network.

device_watch  devices and addresses, now and as they change
lookout       looks that may fail
families      which IP families there are
namespaces    its network namespaces, and work in each of them
sock_diag     sockets with a peer, and how one is ended
ports         source ports kept from its own sockets
conntrack     what kube-proxy sets of connection tracking
capabilities  what this process may do
process       what the kernel is to think of it
sysctl        where sysctls are written
kube_proxy    is there a kube-proxy, or what one left
leftovers     all that one left, and its removal
nft           by nftables, and what keeps NAT alive
tracked       whether conntrack translates connections
iptables      by iptables
xtables       by iptables-legacy, asked of the kernel
ipvs          by IPVS and ipsets
"""
