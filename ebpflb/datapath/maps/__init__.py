# SPDX-License-Identifier: Apache-2.0
"""The maps: their layout, their entries, and where they are pinned.

layout             the structs and maps of bpf/layout.h and bpf/maps.h, read from there
scratch            the working memory of programs as Python objects
socket_records     what the datapath remembers of sockets
packet_records     what it remembers of packets without a flow
records            the keys and values of each map as Python objects
checks             the checks by which elements of maps name their keys
bpf_map            a map as a collection of values: what a plan holds is written here
array_memory       an array's elements as memory of this process, in parts
sizes              what the kernel makes of a map's line
map_sizes          the sizes that an operator may choose, and the record of those in force
locked             tells the kernel of the type of values that programs lock
slices             all entries of a map, in slices
written            how a map tells what is written to it
no_frontends       where no frontend is, so that programs look nothing up
frontend_keys      which addresses and ports are frontends, for very many connections
state_dir          the state directory, where maps and links are pinned
unknown_pins       removes from it what no agent has put there
connection_counts  makes the counts of connections anew where a map of theirs has lost its pin
state_lock         its lock, by which one agent alone serves it
state_record       where its agent's files are
sweep              removes idle flows, and tells programs when there are none
translations       which endpoint each backend's id stands for, for netfilter
occupancy          how full the maps are that programs fill
"""
