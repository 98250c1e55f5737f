# SPDX-License-Identifier: Apache-2.0
"""This machine: its devices, sockets and sysctls, and the traces of a kube-proxy.

device_watch          its devices and their addresses, now and as they change
clients               the network namespaces of clients: by process, name, address and pod
routes                where the kernel would route a packet
listed_route_sources  the sources that routes would select, by device
namespaces            its network namespaces, and calls in each of them
sock_diag             sockets with a peer, and how one is ended

Settings of ebpflb on the machine:

sysctls            those of connection tracking that kube-proxy sets too, and reserved ports
process            this process: its capabilities, OOM score and file limit
scratch_namespace  doctor's temporary namespaces, connected as pods are; they end with doctor

A kube-proxy on the machine:

kube_proxy_watch      whether one is running, or left rules
kube_proxy_leftovers  everything that one left, and its removal
"""
