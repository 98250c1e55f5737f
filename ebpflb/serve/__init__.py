# SPDX-License-Identifier: Apache-2.0
"""What others may ask of a running agent.

status              its words about itself, in a file
servers             all that it answers over HTTP
ports               which are opened, at once or later
listener            listening sockets and connections, in one thread
http                HTTP/1.1 requests and responses
pages               /healthz, /proxyMode, /configz of 10249
health              does it keep up, and is the node to get traffic
service_health      health-check node ports
metrics             all metrics, and how they are shown
metrics_agent       from its words
metrics_maps        from maps and hooks
metrics_kube_proxy  those that kube-proxy has
metrics_library     and those of its libraries
"""
