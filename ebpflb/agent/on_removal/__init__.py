# SPDX-License-Identifier: Apache-2.0
"""Services with on-removal: reset: connections to an endpoint that has gone are reset.

A connection is one that was translated: who went to the endpoint's own address, without the
Service, is left alone. It is known by its frontend and its backend, address and port, as the maps
and conntrack have them:

1. After each sync the agent hands over what the Services want and which endpoints their slices
   list; plan.removed_endpoints keeps which have gone, and since when.
2. When an endpoint's grace has passed, a thread (reset_worker.py) searches its connections in three
   passes, as a packet or a socket may have been inside a hook during the first one.
3. A socket is ended by the kernel. What the packet path translates is marked in the flow table: the
   datapath answers what its client sends by a reset (bpf/engine/flows/follow.h). For a client that
   is silent, and for the endpoint if it lives, the agent makes a segment: a reset where the numbers
   are known; else a SYN-ACK, which every TCP answers by its numbers (RFC 9293 3.10.7.4, RFC 5961
   4), and that answer is reset by the datapath, or by the client, whose connection is over by then.
4. An agent that starts does not know since when endpoints are gone. It searches all connections of
   such Services for endpoints that are not listed, and their grace begins anew. Which Services
   those are it knows of the agent before, as one may have been deleted meanwhile.

reset_worker  when to search: the grace, the passes, and their thread
resets        which connections those are, by sockets, flows and conntrack, and how each is ended
"""
