# SPDX-License-Identifier: Apache-2.0
"""The agent is killed while it writes other weights and schedulers, again and again, under traffic.

Its maps serve until the next agent has written the rest; then shares and counts are right.
"""

import signal
import time
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from math import gcd
from random import Random

from ebpflb.agent import missed_ends
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import (
    LEAST_CONNECTIONS,
    SCHEDULER_ANNOTATION,
    SCHEDULERS,
    WEIGHT_ANNOTATION,
)
from tests.kit import answers, chances
from tests.kit import scheduled as spread
from tests.kit.parameters import both_engines
from tests.kit.requests import lives
from tests.kit.scheduled import CLIENTS, ENDPOINTS, dial, loads, settled
from tests.kit.sockets import Socket
from tests.kit.two_nodes import TwoNodes
from tests.load import LOAD, scaled

ROUNDS, MOST_ROUNDS = max(2, scaled(8)), 24  # kills; until one comes amid writes
OTHERS = 40  # Services that make a change take longer
SEED, SWEPT = 14, 8 * missed_ends.RECOUNT_INTERVAL
WEIGHTS, MOST = (0, 1, 25, 50, 1000), 1000
PAUSE = 0.01 / LOAD


pytestmark = both_engines


def others(chance: Random) -> list[Manifest]:
    """Return unused Services whose scheduler and weights change too; the maps have room for all
    their tables.
    """
    found = []
    for number in range(OTHERS):
        port = [{"name": "tcp", "port": 80, "protocol": "TCP"}]
        name, scheduler = f"other-{number}", {SCHEDULER_ANNOTATION: chance.choice(SCHEDULERS)}
        found.append(manifests.service(name, [f"10.96.7.{number}"], port))
        found[-1]["metadata"]["annotations"] = scheduler
        for half in (0, 128):
            there = [
                manifests.endpoint(f"10.99.{number}.{half + at}", node="x", target="y")
                for at in range(1, 5)
            ]
            slice = manifests.endpoint_slice(name, "IPv4", there, port)
            slice["metadata"]["name"] += f"-{half}"
            slice["metadata"]["annotations"] = {WEIGHT_ANNOTATION: str(chance.randint(1, 1000))}
            found.append(slice)
    return found


def change(two: TwoNodes, chance: Random) -> str:
    """Write another scheduler and other weights for all Services; one endpoint has a weight."""
    name = chance.choice(SCHEDULERS)
    its = [chance.choice(WEIGHTS) for _ in ENDPOINTS]
    its[chance.randrange(len(its))] = MOST
    two.write(spread.weighted(two, name, its), others(chance))
    return name


def kill_amid_writes(two: TwoNodes, chance: Random) -> tuple[str, bool]:
    """Return the new scheduler, and whether the near node's agent died before everything was
    written.
    """
    settings, agent = two.maps["settings"], two.agents[0]
    before, deadline = settings.get(0).writes, time.monotonic() + 240
    name = change(two, chance)
    while settings.get(0).writes == before:
        assert time.monotonic() < deadline
    agent.stop(signal.SIGKILL)
    return name, bool(settings.get(0).writes % 2)


def flags(two: TwoNodes) -> Collection[str]:
    found: Collection[str] = two.maps["settings"].get(0).flags
    return found


def test_no_connection_is_lost_and_all_is_right_afterwards(
    two: TwoNodes, opened: ExitStack
) -> None:
    """New and open connections, of sockets and of packets, succeed; afterwards each scheduler's
    shares are right.
    """
    chance, held, counted = Random(SEED), list[Socket](), len(CLIENTS)
    kills, amid = 0, False
    two.publish(spread.weighted(two, LEAST_CONNECTIONS, chances.EVEN), others(chance))
    settled(two)
    wait_until("packets are counted, too", lambda: "attaching" not in flags(two))
    held += [dial(two, who, opened)[1] for who in CLIENTS]
    pressing = [
        two.start_client(getattr(two, who), protocol, *spread.frontend(two, who, v6=v6), PAUSE)
        for who, protocol, v6 in spread.KINDS
    ]
    while kills < ROUNDS or (not amid and kills < MOST_ROUNDS):
        name, was_amid = kill_amid_writes(two, chance)
        kills, amid = kills + 1, amid or was_amid
        assert all(map(lives, held))
        two.agents[0].start()
        assert "is full" not in two.agents[0].log()
        held += [dial(two, who, opened)[1] for who in CLIENTS]
        counted += len(CLIENTS) * (name == LEAST_CONNECTIONS)
        assert all(map(lives, held)), name
    counts = [two.stop_client(client) for client in pressing]
    assert [each["errors"] for each in counts] == [{}] * len(counts)
    assert amid
    assert_counts(two, counted, opened)
    assert_shares(two)


def assert_counts(two: TwoNodes, counted: int, opened: ExitStack) -> None:
    """Check the counts of connections opened while the Service counted, and of new connections."""
    two.publish(spread.service(two, LEAST_CONNECTIONS))
    two.delete_flows("other_flows")  # of datagrams, which would count until they are idle
    wait_until("only held ones are counted", lambda: sum(loads(two)) == counted, SWEPT)
    opened.close()
    settled(two)
    two.publish(spread.service(two, LEAST_CONNECTIONS, "here", "there"))
    for who in CLIENTS:
        dial(two, who, opened)
        dial(two, who, opened)
    settled(two, len(CLIENTS), len(CLIENTS))
    opened.close()
    settled(two)


def assert_shares(two: TwoNodes) -> None:
    """Check exact turns, and draws by weight; the audit finds the last published state."""
    its = dict(zip(ENDPOINTS, chances.UNEVEN, strict=True))
    turns = {name: weight // gcd(*its.values()) for name, weight in its.items()}
    two.publish(spread.weighted(two, "round-robin", its.values()))
    for who in CLIENTS:
        assert Counter(spread.met(two, who, sum(turns.values()))) == turns
    two.publish(spread.weighted(two, "random", its.values()))
    for who, protocol, v6 in spread.KINDS[::3]:
        where = spread.frontend(two, who, v6=v6)
        found = two.request(getattr(two, who), protocol, *where, chances.DRAWS)
        chances.assert_drawn(found["names"], its)
    found = answers.results(two.ebpflb("doctor", "--no-canary", "-o", "json").stdout)
    audit = [row for row in found if row["feature"].startswith("audit")]
    assert [row["detail"] for row in audit] == ["nothing differs"], audit
