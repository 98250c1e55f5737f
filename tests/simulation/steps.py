# SPDX-License-Identifier: Apache-2.0
"""The steps of a schedule, drawn by a seed, each complete with its arguments."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from tests.simulation.cluster import ENDPOINTS, SERVICES, SHAPE_BITS, SLICES, WEIGHTS
from tests.simulation.places import IPS, PORTS

LEAST, MOST = 6, 16  # steps of a schedule
# Of a Service's shape.
AFFINITY, LEAST_CONNECTIONS, AT_ONCE, SOON, KEPT = 1 << 2, 2 << 10, 1 << 14, 2 << 14, 3 << 14
NODEPORT = 2 << 5
ALL_READY = (1 << ENDPOINTS) - 1


class Step(NamedTuple):
    """A step: the name of a method of ``Happenings``, and its arguments."""

    name: str
    arguments: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.arguments))})"


Draw = Callable[[Random], tuple[int, ...]]


def _mostly(random: Random, usual: int, most: int) -> int:
    return usual if random.random() < 0.6 else random.randint(0, most)


def _shape(random: Random) -> int:
    """Return a shape in which each bit is set in a quarter of all cases."""
    return random.getrandbits(SHAPE_BITS) & random.getrandbits(SHAPE_BITS)


# Step -> how often it is drawn, and its arguments.
STEPS: dict[str, tuple[int, Draw]] = {
    "service": (
        8,
        lambda r: (
            r.randrange(SERVICES), r.randrange(IPS), r.randint(1, len(PORTS)), _shape(r),
        ),
    ),
    "policies": (3, lambda r: (r.randrange(SERVICES), r.randrange(2), r.randrange(2))),
    "delete_service": (3, lambda r: (r.randrange(SERVICES),)),
    "recreate": (2, lambda r: (r.randrange(SERVICES), r.randrange(IPS), _shape(r))),
    "slice": (
        14,
        lambda r: (
            r.randrange(SERVICES), r.randrange(SLICES), r.choice((0, 0, 0, 1, 2, 2)),
            _mostly(r, ALL_READY, ALL_READY), r.randint(0, ALL_READY),
            r.choice((0, 0, 0, *range(len(WEIGHTS)))),
        ),
    ),
    "delete_slice": (3, lambda r: (r.randrange(SERVICES), r.randrange(SLICES), r.randrange(2))),
    "deliver": (20, lambda r: (r.randrange(4), r.randint(1, 4))),
    "relist": (2, lambda r: (r.randrange(4),)),
    "wait": (8, lambda r: (r.choice((10, 400, 1100, 2500)),)),
    "fail": (5, lambda r: (r.randint(1, 30), r.choice((1, 1, 3, 40)), r.randrange(3))),
    "die": (4, lambda r: (r.randint(1, 60), r.randint(0, 4))),
    "restart_agent": (2, lambda r: (r.randint(0, 4),)),
    "unpin": (2, lambda r: (r.randrange(64),)),
    "detach": (1, lambda r: (r.randrange(16),)),
    "damage": (1, lambda r: (r.randrange(64), r.randrange(64))),
    "device": (1, lambda r: (r.randrange(2),)),
    "open": (5, lambda r: (r.randrange(1000),)),
    "flow": (6, lambda r: (r.randrange(1000),)),
    "track": (5, lambda r: (r.randrange(1000),)),
    "fail_conntrack": (1, lambda r: (r.randint(1, 5),)),
    "doctor": (5, lambda r: (r.randrange(2), r.randrange(IPS))),
    "renew": (2, lambda r: ()),
    "end_doctor": (1, lambda r: ()),
    "sweep": (2, lambda r: ()),
    "close": (3, lambda r: (r.randrange(1000),)),
}  # fmt: skip


# Where an API server is in between, these as well. Lists and watches need more steps.
API_STEPS: dict[str, tuple[int, Draw]] = STEPS | {
    "deliver": (30, lambda r: (r.randrange(4), r.randint(1, 9))),
    "relist": (4, lambda r: (r.randrange(4),)),
    "lose": (4, lambda r: (r.randrange(4),)),
    "hang": (3, lambda r: (r.randrange(4),)),
    "refuse": (3, lambda r: (r.randrange(4), r.randint(1, 3))),
    "expire": (2, lambda r: (r.randrange(4),)),
    "lose_event": (3, lambda r: (r.randrange(4),)),
}


def changing_policies() -> list[Step]:
    """Change only the policies of a service with affinity and endpoints here and elsewhere."""
    delivered = [Step("deliver", (kind, 9)) for kind in range(4)]
    begin = [Step("service", (0, 0, 3, AFFINITY)), *_slices(0), *delivered, Step("wait", (1100,))]
    changes = [
        step
        for turn in range(6)
        for step in (Step("policies", (0, 1 - turn % 2, 0)), *delivered, Step("wait", (1100,)))
    ]
    return begin + changes


def changing_policies_and_endpoints(seed: int) -> list[Step]:
    """In each write change a service's policies and endpoints, with affinity.

    Another service changes just before, so that all changes of a period are in the next write.
    """
    random, delivered = Random(seed), [Step("deliver", (kind, 9)) for kind in range(4)]
    begin = [Step("service", (0, 0, 3, AFFINITY | random.getrandbits(2) << 5)), *_slices(0)]
    steps = [*begin, *delivered, Step("wait", (1100,))]
    for turn in range(8):
        steps += [Step("service", (1, 1, 1 + turn % 2, 0)), *delivered]
        steps.append(Step("policies", (0, turn % 2, random.randrange(2))))
        for part in range(SLICES):
            bits = random.randint(0, ALL_READY), random.randint(0, ALL_READY)
            steps.append(Step("slice", (0, part, 0, *bits, 0)))
        steps += [*delivered, Step("wait", (1100,))]
    return steps


def removing_endpoints(shape: int, *after: Step) -> list[Step]:
    """Open connections and flows to all endpoints of a service, and remove them."""
    delivered = [Step("deliver", (kind, 9)) for kind in range(4)]
    begin = [Step("service", (0, 0, 3, shape)), *_slices(0), *delivered, Step("wait", (1100,))]
    clients = [Step(name, (which,)) for which in range(24) for name in ("open", "flow", "track")]
    less = [Step("slice", (0, 1, 0, 6, 0, 0)), Step("delete_slice", (0, 0, 0))]
    return [*begin, *clients, Step("wait", (400,)), *less, *delivered, *after]


def deleting_a_service() -> list[Step]:
    """Delete a service with connections: its pods' addresses may be reused."""
    delivered = [Step("deliver", (kind, 9)) for kind in range(4)]
    deleted = [Step("delete_service", (0,)), *delivered, Step("wait", (2500,))]
    return removing_endpoints(NODEPORT, *deleted)


def losing_conntrack() -> list[Step]:
    """Let requests fail in both searches for stale flows."""
    before, after = removing_endpoints(0, Step("wait", (400,))), [Step("wait", (2500,))]
    at = before.index(Step("wait", (400,)))
    return [*before[:at], Step("fail_conntrack", (3,)), *before[at:], *after]


def losing_an_event() -> list[Step]:
    """Let a watch omit the removal of endpoints."""
    delivered = [Step("deliver", (kind, 9)) for kind in range(4)]
    begin = [Step("service", (0, 0, 3, 0)), *_slices(0), *delivered, Step("wait", (1100,))]
    lost = [Step("lose_event", (kind,)) for kind in range(4)]
    return [*begin, *lost, Step("slice", (0, 0, 0, 1, 0, 0)), *delivered]


def claiming_a_canarys_frontends() -> list[Step]:
    """Let a Service claim the NodePort of doctor's canary."""
    delivered = [Step("deliver", (kind, 9)) for kind in range(4)]
    begin = [Step("service", (0, 0, 3, 0)), *_slices(0), *delivered, Step("wait", (1100,))]
    services = [Step("service", (2, 2, 1, NODEPORT)), *_slices(2)]
    doctor = [Step("doctor", (0, 2)), Step("wait", (400,)), *services, *delivered]
    return [*begin, *doctor, Step("wait", (1100,)), Step("renew"), Step("wait", (1100,))]


def losing_netfilters_table() -> list[Step]:
    """Remove the table while no agent runs."""
    delivered = [Step("deliver", (kind, 9)) for kind in range(4)]
    begin = [Step("service", (0, 0, 3, 0)), *_slices(0), *delivered, Step("wait", (1100,))]
    away = [Step("restart_agent", (1,)), Step("lose_table"), *delivered, Step("wait", (1100,))]
    return [*begin, *away, Step("slice", (0, 0, 0, 1, 0, 0)), *delivered, Step("wait", (1100,))]


def _slices(service: int) -> list[Step]:
    return [Step("slice", (service, part, 0, ALL_READY, 0, 0)) for part in range(SLICES)]


def draw_api(seed: int) -> list[Step]:
    """Draw a schedule with an API server."""
    return draw(seed, API_STEPS)


def draw(seed: int, table: dict[str, tuple[int, Draw]] = STEPS) -> list[Step]:
    """Draw the schedule of a seed: it begins with some services, all delivered."""
    random = Random(seed)
    begin = [Step(name, STEPS[name][1](random)) for name in ("service", "slice") * 3]
    names, weights = list(table), [weight for weight, _ in table.values()]
    drawn = random.choices(names, weights, k=random.randint(LEAST, MOST))
    delivered = [Step("deliver", (kind, 9)) for kind in random.sample(range(4), 4)]
    return [*begin, *delivered, *(Step(name, table[name][1](random)) for name in drawn)]
