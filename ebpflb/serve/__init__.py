# SPDX-License-Identifier: Apache-2.0
"""The outputs of the running agent: its status in a file, health and metrics over HTTP.

The agent's thread writes status, health, metrics and the endpoint counts of health-check node
ports; the one server thread reads them to respond to requests.

status              the agent's status, in a file; one agent alone on a state directory
conditions          all problems, one list for status, /readyz and metrics; OK, DEGRADED or DOWN
servers             the HTTP servers: ports 10256 and 10249, health-check node ports, local socket;
                    the pages of 10249: /metrics, /proxyMode, /configz, /flagz, /statusz
listener            listening sockets and connections, in one thread
health              10256: whether the agent syncs in time, and the node should get traffic
service_page        a Service as the operator sees it: the answer to `ebpflb services`
metrics             all metrics, and their exposition: what is read at each scrape, series of single
                    Services too, and what the agent counts as it works
"""
