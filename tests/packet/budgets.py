# SPDX-License-Identifier: Apache-2.0
"""The number of packets that the programs may still answer."""

import time

from ebpflb.kernel import bpf
from ebpflb.kernel.maps.bpf_map import possible_cpus
from tests.packet.node import PacketNode


def allow(node: PacketNode, answers: int, *which: int) -> None:
    """Allow this many refusals (0), or answers to pings, in this hour, on each CPU."""
    budgets = node.maps["reject_budgets"]
    left = budgets.value.pack((time.monotonic_ns() + 3600 * 10**9, answers))
    for number in which:
        bpf.map_update(budgets.fd, budgets.key.pack(number), left * possible_cpus())
