# SPDX-License-Identifier: Apache-2.0
"""What this machine is: its devices, sockets and sysctls, and what a kube-proxy does on it.

device_watch          its devices and their addresses, now and as they change
clients               who may ask for a service on it: namespaces by process, name, address and pod
routes                where it would route a packet
listed_route_sources  the sources that routes would choose, by device
namespaces            its network namespaces, and work in each of them
sock_diag             sockets with a peer, and how one is ended
poller                a check that is repeated, and reports when it fails and when it has recovered

What ebpflb sets on it:

sysctls            those of connection tracking that kube-proxy sets too, and reserved ports
process            this process: its capabilities, OOM score and file limit
scratch_namespace  doctor's own namespaces, joined to it as pods are; they end with doctor

A kube-proxy on it:

kube_proxy_watch      is one running, or did one leave rules
kube_proxy_leftovers  all that one left, and its removal
"""
