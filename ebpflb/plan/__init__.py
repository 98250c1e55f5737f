# SPDX-License-Identifier: Apache-2.0
"""What must change: wanted entries, ids, ranges, and the ordered difference, as pure values.

entries     the map entries, as values
wanted      a service port and its selection -> what the datapath should hold for it
numbers     ids and ranges of slots: which are free, which rest in quarantine
claims      who gets a frontend that several services name
spans       networks as keys of the maps, and the smallest that holds them all
programmed  one service port as the maps hold it
internal    the cluster IPs that frontends stand for
admission   the source ranges that restricted frontends let in
present     what the maps hold already, read back at start
plan        the ordered difference
planner     wanted against present -> plan
local       what the datapath should know of this node: settings and devices
flow_entries  which entries of the packet path are one flow, and how it stands
expiry      when a flow has been idle for too long
stale       which flows lost their backend, and where they may go
use         how full the maps are
"""
