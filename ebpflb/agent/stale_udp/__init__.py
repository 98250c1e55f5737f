# SPDX-License-Identifier: Apache-2.0
"""Stale UDP sockets: connected sockets whose backend no longer serves (kube-proxy.md 11.1).

A connect hook gives a UDP socket the address of a backend, and from then on the kernel sends the
socket's datagrams directly to that backend. When the backend is removed from the service no hook
can send the socket elsewhere: the socket is stale. kube-proxy deletes the conntrack entries of such
flows; here the socket itself is ended: its owner gets ECONNABORTED (EDESTADDRREQ if it sends first)
and connects again, to a backend that serves. If none does, or the frontend was removed, the socket
is ended all the same: the backend's address may be a stranger's by now.

A TCP socket is ended if its connection is still to be answered by a backend that was removed or set
aside, and the entry of such a connection in conntrack is deleted, so that the client's next SYN
gets another backend. Open connections are left alone.

The steps:

1. After each sync the agent passes on which backends and frontends the plans removed from UDP
   service ports (plan.service_entries.BackendChange); a thread (worker.py) does the rest.
2. The counters of those backends show whether any socket may still be connected to them. Only then
   the map of sockets is searched for entries whose backend no longer serves (socket_search.py,
   by the datapath's own look-ups: lookups.py).
3. Only if there are any, the connected UDP sockets of their network namespaces are listed by
   sock_diag, found by their cookies, and ended by SOCK_DESTROY. Sockets that connected to the
   same backend directly are left alone.
4. A second pass follows a second later: a socket may have been inside a hook during the first one,
   given the removed backend but not yet written to the map.

Two other threads delete stale entries of conntrack, as kube-proxy does. They may be entries of the
netfilter engine, or of a kube-proxy that served before. Neither thread waits for the search of
sockets. conntrack_worker.py deletes the entries of flows that the programs report: the flow's last
datagram got another backend. conntrack_worker.py searches conntrack for entries that a change may
have made stale (plan.flow_entries.StaleCandidates).

conntrack_worker   when conntrack is searched for stale entries; and the thread
worker             when to search: after which changes, in which passes; and the thread
socket_search      finds stale sockets and ends them
lookups            the datapath's look-ups, and which sockets they show to be stale
"""
