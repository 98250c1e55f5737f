# SPDX-License-Identifier: Apache-2.0
"""This machine: its devices, sockets and sysctls, and the traces of a kube-proxy.

device_watch       its devices and their addresses, now and as they change
routes             where the kernel would route a packet, and from which source
namespaces         its network namespaces, calls in each of them, and the clients there
sock_diag          sockets with a peer, and how one is ended

Settings of ebpflb on the machine:

sysctls            those of connection tracking that kube-proxy sets too, and reserved ports
scratch_namespace  doctor's temporary namespaces, connected as pods are; they end with doctor

A kube-proxy on the machine:

kube_proxy         whether one runs, everything that one left, and its removal
"""
