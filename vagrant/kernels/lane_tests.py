# SPDX-License-Identifier: Apache-2.0
"""What runs on the kernels: TESTS with every change, ALL_TESTS and MORE before a
release.

    loads      every program of bpf/hooks in every variant that the kernel takes, within the
               verifier's budget, and at cgroups and devices in every way the kernel has; one
               compilation by BCC; what `ebpflb check` finds
    datapath   maps, programs, links, pins, devices, sweeps and sockets that are ended, against this
               kernel's bpf(2) and netlink
    packet     the packet programs on packets, by BPF_PROG_TEST_RUN
    node       what kube-proxy's ipvs mode leaves, and that it goes
    network    real sockets and real packets through real hooks, with the real agent

Emulated, Python is twenty times slower and a cluster takes 20 s: so each test runs with few
of its parameters (parameter_sets.py), loads are a fiftieth (tests/load.py), the files of
tests/network that can share one cluster do so, and most of those that restart agents often are left
out. With every change those of LONG are left out too, and second sets of parameters; each file of
PACKET and NETWORK runs on one of the kernels, in turns, and all the others on each. The order of
those of NETWORK is such that the kernels take equally long.
"""

BUDGET = "tests/kernels/inside/test_verifier.py"
ALL_TESTS = (
    "--parameter-sets=2",
    "--parameter-sets=1:tests/packet",
    "--parameter-sets=1:tests/kernel/attach/test_device_changes.py",
    "--parameter-sets=1:tests/kernel/attach/test_neighbours.py",
    "--parameter-sets=1:tests/network/test_packets_table.py",
    "--parameter-sets=1:tests/network/test_packets_refusal.py",
    "--parameter-sets=1:tests/network/test_on_removal.py",
    "--parameter-sets=1:tests/network/test_some_services.py",
    "--parameter-sets=1:tests/network/test_shadow.py",
    "--parameter-sets=1:tests/network/test_killed_amid_changes.py",
    "--parameter-sets=1:tests/network/test_sockets.py",
    "--parameter-sets=1:tests/network/test_stale_udp.py",
    "--parameter-sets=1:tests/network/test_translated_once.py",
    # seconds of Python that ask the kernel nothing new
    "--deselect=tests/kernel/maps/test_state_dir.py::test_bpffs_is_mounted",
    "tests/kernels/inside",
    "tests/kernel/maps/test_maps.py",
    "tests/kernel/programs/test_loader.py",
    "tests/kernel/test_probe.py",
    "tests/kernel/attach/test_cgroup_links.py",
    "tests/kernel/maps/test_state_dir.py",
    "tests/kernel/attach/test_devices.py",
    "tests/kernel/attach/test_device_changes.py",
    "tests/kernel/attach/test_neighbours.py",
    "tests/kernel/test_datapath.py",
    "tests/kernel/maps/test_sweep.py",
    "tests/kernel/node/test_sock_diag.py",
    "tests/kernel/node/test_flowtable.py",
    "tests/agent/stale",
    "tests/packet",
    "tests/kernel/node/test_ipvs.py",
    # these share two nodes with each engine
    "tests/network/test_packets_refusal.py",
    "tests/network/test_packets_table.py",
    "tests/network/test_egress.py",
    "tests/network/test_on_removal.py",
    "tests/network/test_moving_udp.py",
    # with a node of its own, where the kernel has what it needs
    "tests/network/test_flowtable.py",
    "tests/network/test_be_liberal.py",
    # each with two nodes of its own
    "tests/network/test_killed_amid_changes.py",
    "tests/network/test_sctp.py",
    "tests/network/test_translated_once.py",
    # these share one cluster: first those that need it unchanged, last those that change it
    "tests/network/test_release.py",
    "tests/network/test_sockets.py",
    "tests/network/test_stale_udp.py",
    # each has a node of its own, with kube-proxy's rules
    "tests/network/test_some_services.py",
    "tests/network/test_shadow.py",
)

# Seconds on 5.10, emulated, with the other kernels beside it.
LONG = (
    "tests/kernel/test_datapath.py",  # 72
    "tests/kernel/attach/test_devices.py",  # 51
    "tests/kernel/attach/test_neighbours.py",  # 29
    "tests/kernel/node/test_flowtable.py",  # 20; 147 with that of tests/network on 6.12
    "tests/agent/stale/test_worker.py",  # 30
    "tests/packet/test_half_open.py",  # 93
    "tests/packet/test_least_connections.py",  # 26
    "tests/packet/test_mutations.py",  # 26
    "tests/packet/test_recycled_flows.py",  # 13
    "tests/network/test_egress.py",  # 140
    "tests/network/test_sctp.py",  # 50
    "tests/network/test_on_removal.py",  # 73
    "tests/network/test_flowtable.py",
    "tests/network/test_be_liberal.py",
    "tests/network/test_release.py",  # 45
    "tests/network/test_moving_udp.py",
    "tests/network/test_killed_amid_changes.py",  # 182
    "tests/network/test_some_services.py",  # 252
    "tests/network/test_shadow.py",  # 112
)
TESTS = (
    *(word for word in ALL_TESTS if word not in LONG),
    *(f"--ignore={path}" for path in LONG),  # in a folder that is named
    "--parameter-sets=1",
)

PACKET, NETWORK = "tests/packet", "tests/network/"  # each file of these runs on one kernel

# What runs after ALL_TESTS, in machines started anew.
MORE = (
    "--parameter-sets=1",
    # the cluster and the two nodes that files share
    "tests/network/test_netfilter_engine.py",
    "tests/network/test_netfilter_segments.py",
    "tests/network/test_kernel_sockets.py",
    # each with nodes of its own
    "tests/network/test_netfilter_floods.py",
    "tests/network/test_netfilter_operation.py",
    "tests/network/test_from_ipvs.py",
    "tests/network/test_route_sources.py",
    "tests/network/test_packet_mark.py",
    "tests/network/test_uplink_kinds.py",
    "tests/network/test_other_filters.py",
    "tests/network/test_shapers.py",
)

# On arm64, where nothing compiles: every program of the bytecode, packets, and Services that are
# published and asked on both engines.
ARM64_TESTS = (
    "--parameter-sets=1",
    "tests/kernels/inside/test_verifier.py::test_everything_loads",
    "tests/kernels/inside/test_attach.py",
    "tests/kernel/maps/test_maps.py",
    "tests/kernel/attach/test_cgroup_links.py",
    "tests/packet/test_affinity.py",
    "tests/packet/test_connections.py",
    "tests/packet/test_datagrams.py",
    "tests/packet/test_errors.py",
    "tests/packet/test_forwarded.py",
    "tests/packet/test_fragments.py",
    "tests/packet/test_hairpin.py",
    "tests/packet/test_policies.py",
    "tests/packet/test_recycled_flows.py",
    "tests/packet/test_refusal.py",
    "tests/network/test_packets_table.py",
)
