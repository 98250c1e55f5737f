# SPDX-License-Identifier: Apache-2.0
"""What least-connections is worth when each of several nodes counts its own connections.

    python -m bench.own_counts

Computed, not measured: connections come at random, by a random node; an endpoint serves one after
the other. The endpoints and the rate are those of ``bench.schedulers``.
"""

import random
from heapq import heappop, heappush

SERVICE_TIMES = (0.002, 0.002, 0.002, 0.008)  # seconds
RATE = 400  # connections a second
CONNECTIONS = 50_000
NODES = (1, 2, 4, 16, 64, 256)


def main() -> None:
    print(f"random: {p99(nodes=0):.0f} ms")
    for nodes in NODES:
        print(f"least-connections, {nodes} nodes: {p99(nodes):.0f} ms")


def p99(nodes: int) -> float:
    """Return the 99th percentile in ms from connect to answer; without nodes nobody counts."""
    draw = random.Random(1)
    count = [[0] * len(SERVICE_TIMES) for _ in range(max(1, nodes))]  # by node and endpoint
    idle_at = [0.0] * len(SERVICE_TIMES)
    ends: list[tuple[float, int, int]] = []
    took: list[float] = []
    now = 0.0
    for _ in range(CONNECTIONS):
        now += draw.expovariate(RATE)
        while ends and ends[0][0] <= now:
            _, node, endpoint = heappop(ends)
            count[node][endpoint] -= 1
        node = draw.randrange(len(count))
        drawn = draw.sample(range(len(SERVICE_TIMES)), 2)
        endpoint = min(drawn, key=count[node].__getitem__) if nodes else drawn[0]
        idle_at[endpoint] = max(now, idle_at[endpoint]) + SERVICE_TIMES[endpoint]
        count[node][endpoint] += 1
        heappush(ends, (idle_at[endpoint], node, endpoint))
        took.append(idle_at[endpoint] - now)
    return 1000 * sorted(took)[len(took) * 99 // 100]


if __name__ == "__main__":
    main()
