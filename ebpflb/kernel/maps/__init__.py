# SPDX-License-Identifier: Apache-2.0
"""The maps: their layout, their entries, and where they are pinned.

layout             the structs and maps of bpf/layout.h and bpf/maps.h, read from there
records            the keys and values of each map as Python objects
bpf_map            a map as a collection of values; a plan's entries are written here
creation           creates a map as its line in maps.h defines it
no_frontends       bits that tell programs where no frontend is, so that they skip the look-up
frontend_keys      which addresses and ports are frontends, for very many connections
state_dir          the state directory, where maps and links are pinned
state_record       what the agent records there: its directories and the sizes of the maps
bpffs              where the bpffs is mounted that holds state directories, and why it is not seen
sockets            what the maps remember of sockets, at their places and in the hash
ring               reads a ring buffer
sweep              removes idle flows, and tells programs when no flow is left
translations       which endpoint each backend's id stands for, for netfilter
stale_endpoints    UDP endpoints removed a moment ago, whose datagrams egress reports
occupancy          how full the maps are that programs fill
"""
