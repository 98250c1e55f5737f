# SPDX-License-Identifier: Apache-2.0
"""What the figures are to be: all targets, once.

These were targets once. A user does not notice them, or another target has them in it:

- the programs' nanoseconds of a whole connection: the rate of connections has them in it
- --fast-forward's cost of a packet as a part of nftables': whether a node spends less than a router
  does, which has no Services at all, is the question; so it is compared with direct routing
- the connections a second with --fast-forward as a multiple of nftables': it begins at a flow's
  17th packet, so a short connection can only cost the same
- a first datagram's nanoseconds: it is one of thousands that a socket sends
- what a draw costs more than one at random: some 5 % of a connection at most
- the seconds of a cold start's map writes: the cold start has them in it

And these no design reaches:

- 60 ns for a packet that asks for nothing, among real traffic: the kernel's call of a program that
  does nothing takes 66 ns; only a program that is not attached costs nothing
- connect4 in 500 ns, to any of 10,000 Services in 850, sock_release in 250: what the kernel's
  call, the look-ups, the draw and the remembered socket take at least is in the targets below

And these are missed (bench/results/README.md has the profiles):

- FAST_SHORT: the kernel's look-ups in the flowtable alone take four times as much
- RELEASE with one Service: what an empty program shows takes most of it, and differs by machine
- a first start with 500 devices in half of the time that two programs a device take: the rest of
  the start takes 0.7 s
"""

# Sockets: ratio; nanoseconds a call
CLUSTER_IP = 1.03  # times a direct connection
CALL, RELEASE = 650, 257
ANY_SERVICE = 950  # connect4 to any of 10,000
OTHER_SOCKET = 60  # more than a program that does nothing

# Packets: times nftables, at least; times direct routing, at most; nanoseconds of a program
NETFILTER_RATE = 0.99  # connections a second
NETFILTER_PACKETS = {"local": 1.0, "remote": 0.99}  # a packet's cost
FAST_SHORT = 1.005  # times a short connection without --fast-forward, at most
FAST = {"local": 0.65, "remote": 1.0}  # a packet's cost with --fast-forward, of direct routing's
NO_SERVICE, NO_SERVICE_UDP_INGRESS = 60, 90  # by test runs; an empty program takes 26 of them
CHOSEN = {"TCP": 50, "UDP": 100}  # an established packet that netfilter translates

# A load balancer address whose owner's cable is pulled: seconds until another node serves it
FAILOVER, FAILOVER_WORST = 1.5, 3.0
ANSWER = 1  # milliseconds, at 10,000 questions a second

# Requests that are handed over: a packet against one that is routed, rates against masqueraded ones
HANDED_PACKET, HANDED_RATE = 1.0, 1.1
NOT_HANDED = 2  # nanoseconds of a packet for others

# The agent: MB, seconds, milliseconds
MEMORY_IDLE, MEMORY_LARGE = 55, 160
FIRST_START = 1
DEVICES_START, DEVICES_CHANGE, DEVICES_PAIR, DEVICES_IDLE = 5, 50, 15, 5  # with 500 devices
COLD_START, WARM_RESTART = 4, 4
WARM_WRITES = 4  # the canary's Services come and go
FIRST_ANSWER_P50, FIRST_ANSWER_P99 = 7, 50
CPU_A_CHANGE = 1.0  # at 100 changes a second or more
LAST_DATAGRAM = 50  # from a slice to the last datagram that a removed endpoint gets
ENDED_SOCKET = 500  # from a slice to the error of a connected UDP socket, beside 110 pods
