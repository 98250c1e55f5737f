# SPDX-License-Identifier: Apache-2.0
"""Would a zone preference that spills over work, if each node knows its own counts only? Simulated.

    python -m bench.zones [--seconds S]

Three zones, in each 10 nodes and 4 endpoints. Connections come to the nodes at random times and
last a second on average, longer where an endpoint has more than its capacity. A node sends a
connection to its zone, or to another zone if its own counts say so:

- *ratio*: it has more than twice as many to an endpoint of its zone as to one elsewhere, plus one;
- *limit*: it has as many to an endpoint of its zone as the Service's owner allows.

The load is even (half of the capacity in each zone) or uneven (three fifths of it in one zone).
``swing`` is how much the part that crosses zones varies from second to second, as a multiple of
what chance gives: above 1 it goes up and down.
"""

import argparse
import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, pvariance

from bench.report import Lines, Row
from bench.result import run_bench

ZONES, NODES, ENDPOINTS = 3, 10, 4  # of a zone
RATIO = 2.0
WARM = 20.0  # seconds
EVEN, UNEVEN = (1 / 3, 1 / 3, 1 / 3), (0.6, 0.2, 0.2)
LOADS = {"even": (EVEN, 0.5), "uneven": (UNEVEN, 0.75)}  # parts of the zones, of the capacity
Spills = Callable[[float, float], bool]  # by a node's mean counts to its zone, and elsewhere


def main() -> None:
    run_bench(__doc__, _measured, seconds=120.0)


def _measured(wanted: argparse.Namespace) -> Lines:
    for open_of_a_node in (2, 40):
        capacity = open_of_a_node * NODES / ENDPOINTS / LOADS["even"][1]
        limit = 1.5 * open_of_a_node / ENDPOINTS
        rules: dict[str, Spills] = {
            "never spills": lambda own, other: False,
            "ratio": lambda own, other: own > RATIO * (other + 1),
            "limit": lambda own, other: own >= limit,  # noqa: B023
        }
        for load, (parts, used) in LOADS.items():
            yield f"{open_of_a_node} connections of a node, load {load}"
            for name, spills in rules.items():
                rate = used * capacity * ENDPOINTS * ZONES
                crossing, worst, swing = simulated(parts, rate, capacity, spills, wanted.seconds)
                note = f"busiest zone {worst:.2f} of its capacity; swing {swing:.2f}"
                yield Row(f"{name}, crosses zones", 100 * crossing, "%", note=note)


def simulated(
    parts: Sequence[float], rate: float, capacity: float, spills: Spills, seconds: float
) -> tuple[float, float, float]:
    """Return the part that crosses zones, the load of the busiest zone, and the swing."""
    drawn = random.Random(1)
    own = [[0] * ZONES for _ in range(ZONES * NODES)]  # connections of a node to a zone
    load = [0] * (ZONES * ENDPOINTS)
    ends: list[tuple[float, int, int]] = []
    crossed, made, busiest = Counter[int](), Counter[int](), list[float]()
    now = 0.0
    while now < WARM + seconds:
        now += drawn.expovariate(rate)
        while ends and ends[0][0] <= now:
            _, node, endpoint = heapq.heappop(ends)
            own[node][endpoint // ENDPOINTS] -= 1
            load[endpoint] -= 1
        zone = drawn.choices(range(ZONES), parts)[0]
        node = zone * NODES + drawn.randrange(NODES)
        others = [each for each in range(ZONES) if each != zone]
        mean = fmean(own[node][each] for each in others) / ENDPOINTS
        to = drawn.choice(others) if spills(own[node][zone] / ENDPOINTS, mean) else zone
        endpoint = to * ENDPOINTS + drawn.randrange(ENDPOINTS)
        own[node][to] += 1
        load[endpoint] += 1
        lasts = drawn.expovariate(1.0) * max(1.0, load[endpoint] / capacity)
        heapq.heappush(ends, (now + lasts, node, endpoint))
        if now >= WARM:
            made[int(now)] += 1
            crossed[int(now)] += to != zone
            busiest.append(max(_loads(load)) / capacity / ENDPOINTS)
    part = crossed.total() / made.total()
    shares = [crossed[it] / made[it] for it in made if made[it]]
    chance = part * (1 - part) / fmean(made.values())
    return part, fmean(busiest), (pvariance(shares) / chance) ** 0.5 if chance else 0.0


def _loads(load: Sequence[int]) -> list[int]:
    return [sum(load[zone * ENDPOINTS :][:ENDPOINTS]) for zone in range(ZONES)]


if __name__ == "__main__":
    main()
