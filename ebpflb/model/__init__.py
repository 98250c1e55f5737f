# SPDX-License-Identifier: Apache-2.0
"""What it means: the API's objects and the answers kube-proxy would give, as pure functions.

objects    what the API says, only the fields that we read
addresses  addresses as Kubernetes reads them
events     how a cluster tells of its objects
services   one Service -> its service ports, per family      (kube-proxy.md 1)
endpoints  the EndpointSlices of a Service -> its endpoints  (kube-proxy.md 2)
selection  which of the endpoints a service port uses        (kube-proxy.md 3)
nodes      a Node -> its zone and addresses                  (kube-proxy.md 17)
cidrs      a ServiceCIDR -> where cluster IPs are from      (kube-proxy.md 6.3)
nodeports  on which of our addresses NodePorts are served    (kube-proxy.md 8)
picture    the cluster as last heard: events in, touched services out
"""
