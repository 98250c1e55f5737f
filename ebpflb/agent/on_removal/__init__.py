# SPDX-License-Identifier: Apache-2.0
"""Services with on-removal: reset: connections to a removed endpoint are reset.

Only translated connections count: a client that connected to the endpoint's own address, without
the Service, is left alone. A connection is known by its frontend and its backend, address and port,
in the maps and in conntrack:

1. After each sync the agent passes on the Services' settings and the endpoints in their slices;
   plan.removed_endpoints keeps which endpoints were removed, and when.
2. When an endpoint's grace has passed, a thread (reset_worker.py) searches its connections in three
   passes, as a packet or a socket may have been inside a hook during the first one.
3. The kernel ends a socket. A flow of the packet path is marked in the flow table: the datapath
   answers its client's packets with a reset (bpf/engine/flows/follow.h). For a silent client, and
   for the endpoint if it lives, the agent makes a segment: a reset if the numbers are known;
   otherwise a SYN-ACK, which every TCP answers with its numbers (RFC 9293 3.10.7.4, RFC 5961 4).
   That answer is reset by the datapath, or by the client, whose connection is over by then.
4. A starting agent does not know when endpoints were removed. It searches all connections of such
   Services for endpoints that are not listed, and their grace begins again. It knows these
   Services from the previous agent, as one may have been deleted meanwhile.

reset_worker  when to search: the grace, the passes, and their thread
resets        which connections to reset, by sockets, flows and conntrack, and how each is ended
"""
