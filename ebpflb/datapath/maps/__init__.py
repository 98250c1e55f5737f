# SPDX-License-Identifier: Apache-2.0
"""The maps: their layout, their entries, and where they are pinned.

layout     the structs and maps of bpf/layout.h and bpf/maps.h, read from there
records    the keys and values of each map as Python objects
bpf_map    a map as a collection of values: what a plan holds is written here
frontend_keys  which addresses and ports are frontends, for very many connections
state_dir  the state directory, where maps and links are pinned
sweep      removes idle flows
occupancy  how full the LRU maps are
"""
