# SPDX-License-Identifier: Apache-2.0
"""The maps: their layout, their entries, and where they are pinned.

layout             the structs and maps of bpf/layout.h and bpf/maps.h, read from there
records            the keys and values of each map as Python objects
bpf_map            a map as a collection of values; a plan's entries are written here
readers            what is read in large parts: frontends, translations, sockets, the rings
service_places     the copies of services' entries in an array, where look-ups begin
state_dir          the state directory in a bpffs, where maps and links are made and pinned
sweep              removes idle flows, and tells programs when no flow is left
"""
