# SPDX-License-Identifier: Apache-2.0
"""How full the maps are that a planner fills, at the price of a few look-ups."""

from ebpflb.plan.planner import Planner


def used(planner: Planner) -> dict[str, int]:
    """Map -> how many of its entries are given away, those included that rest.

    The thread that plans may be at work meanwhile: each number is of one moment.
    """
    free_ranges = list(planner.slots.free_ranges)
    return {
        "services": len(planner.owners),
        "slots": planner.capacity.slots - sum(gap.size for gap in free_ranges),
        "members": len(planner.backend_ids.used),
        "service_stats": len(planner.service_ids.used),
        "source_ranges": len(planner.source_ranges.held),
        "cluster_ips": len(planner.cluster_ips.counts),
    }
