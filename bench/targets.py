# SPDX-License-Identifier: Apache-2.0
"""What the figures are to be: all targets, once."""

# Sockets: ratio; nanoseconds a call
CLUSTER_IP = 1.03  # times a direct connection
CALL, RELEASE, FIRST_DATAGRAM = 500, 250, 600
ANY_SERVICE = 850  # connect4 to any of 10,000
OTHER_SOCKET = 60  # more than a program that does nothing
DRAW = 40  # more than at random

# Packets: times nftables, at least; nanoseconds of a program; of all programs, a connection
LEAN = 1.33
NETFILTER_RATE, NETFILTER_PACKETS = 0.99, 0.98  # connections a second; a TCP packet's cost
FAST, FAST_RATE = 1.7, 1.15  # with --fast-forward: a packet's cost, connections to local endpoints
NO_SERVICE, NO_SERVICE_UDP_INGRESS = 60, 90  # by test runs an empty program takes 26 of them
CHOSEN = {"TCP": 50, "UDP": 100}  # an established packet that netfilter translates
CONNECTION = {"local": 4000, "remote": 4800}

# The agent: MB, seconds, milliseconds
MEMORY_IDLE, MEMORY_LARGE = 60, 160
FIRST_START = 1
DEVICES_START, DEVICES_CHANGE, DEVICES_PAIR, DEVICES_IDLE = 5, 50, 15, 5  # with 500 devices
COLD_START, MAP_WRITES, WARM_RESTART, WARM_WRITES = 4, 1, 1.5, 0
FIRST_ANSWER_P50, FIRST_ANSWER_P99 = 10, 50
CPU_A_CHANGE = {100: 0.5, 400: 0.3, 1000: 0.3}  # by changes a second
NOTICED = 3  # from a node's death until the last other node has noticed it
PROBES = 5  # milliseconds a second, at 5,000 nodes
LAST_DATAGRAM = 50  # from a slice to the last datagram that a removed endpoint gets
