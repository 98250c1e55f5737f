# SPDX-License-Identifier: Apache-2.0
"""What it means: the API's objects and the answers kube-proxy would give, as pure functions.

objects    what the API says, only the fields that we read
fields     those that must mean something
addresses  addresses as Kubernetes reads them
lists      the kernel's lists of numbers, of CPUs or ports
events     how a cluster tells of its objects
services   one Service -> its service ports, per family      (kube-proxy.md 1)
endpoints  the EndpointSlices of a Service -> its endpoints  (kube-proxy.md 2)
selection  which of the endpoints a service port uses        (kube-proxy.md 3)
nodes      a Node -> its zone, addresses, and eligibility    (kube-proxy.md 13.1, 17)
service_cidrs  a ServiceCIDR -> where cluster IPs are from      (kube-proxy.md 6.3)
nodeports  on which of our addresses NodePorts are served    (kube-proxy.md 8)
devices    which devices are served, and as whom traffic leaves
locality   who counts as a pod                               (kube-proxy.md 5.2)
no_local   service ports that policy Local leaves empty      (kube-proxy.md 14)
latency    since when changes wait to be programmed          (kube-proxy.md 16.4)
health     what health-check node ports are to say           (kube-proxy.md 10)
cluster_state  the state of the cluster: apply an event, read which services changed

What kube-proxy leaves on a node (kube-proxy.md 17):

kube_proxy       by name
iptables         its part of what iptables-save says
virtual_servers  its virtual servers of IPVS
"""
