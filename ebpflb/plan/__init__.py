# SPDX-License-Identifier: Apache-2.0
"""What must change: wanted entries, ids, ranges, and the ordered difference, as pure values.

entries     the map entries, as values
wanted      a service port and its selection -> what the datapath should hold for it
numbers     ids and ranges of slots: which are free, which rest in quarantine
claims      who gets a frontend that several services name
spans       networks as keys of the maps, and the smallest that holds them all
programmed  one service port as the maps hold it
internal    the cluster IPs that frontends stand for
present     what the maps hold already, read back at start
plan        the ordered difference
planner     wanted against present -> plan
flows    which entries of the packet path are one flow, and how it stands
expiry   when a flow has been idle for too long
"""
