# SPDX-License-Identifier: Apache-2.0
"""In any order of events no request goes wrong, and the final state is correct.

EBPFLB_SEED=N replays the schedule of one seed, which a failure names.
"""

import os

import pytest

from tests.load import scaled
from tests.simulation.api_mutations import OF_THE_API
from tests.simulation.canary_mutations import OF_CANARIES
from tests.simulation.ending_mutations import OF_ENDINGS
from tests.simulation.history_mutations import OF_THE_HISTORY
from tests.simulation.schedules import Runner
from tests.simulation.steps import Step, changing_policies_and_endpoints
from tests.simulation.write_mutations import OF_WRITES

PARTS, SCHEDULES = 4, scaled(375)  # in each part
API_PARTS, API_SCHEDULES = 2, scaled(250)
CHOSEN = os.environ.get("EBPFLB_SEED", "")


def seeds(part: int, count: int) -> list[int]:
    if CHOSEN:
        return [int(CHOSEN)] if part == 0 else []
    return list(range(part * 10_000, part * 10_000 + count))


def check(runner: Runner, seeds: list[int]) -> None:
    failures = [failure for seed in seeds if (failure := runner.failure(seed))]
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_goes_wrong(runner: Runner, part: int) -> None:
    """Nothing goes wrong; seeds choose endpoints, services, faults, deaths and damage."""
    check(runner, seeds(part, SCHEDULES))


@pytest.mark.parametrize("part", range(API_PARTS))
def test_nothing_goes_wrong_behind_an_api_server(api_runner: Runner, part: int) -> None:
    """Nothing goes wrong while lists come in pages, and watches break, hang, or are 410 Gone."""
    check(api_runner, seeds(part, API_SCHEDULES))


def served(*after: Step) -> list[Step]:
    """Return a service with endpoints, in force; then these steps."""
    delivered = [Step("deliver", (kind, 9)) for kind in range(4)]
    begin = [Step("service", (0, 0, 3, 0)), Step("slice", (0, 0, 0, 7, 0, 0))]
    return [*begin, *delivered, Step("wait", (1100,)), *after]


def test_unused_addresses_are_dropped_while_a_new_agent_does_not_know_the_ranges(
    runner: Runner,
) -> None:
    """The former agent's ranges are in force until the new agent has a list."""
    needed = [Step("deliver", (kind, 9)) for kind in (0, 1, 2)]
    steps = served(Step("restart_agent", (0,)), *needed, Step("wait", (400,)))
    assert runner.run(steps).error is None


def test_what_a_failed_write_has_removed_is_ended(runner: Runner) -> None:
    """A Service's UDP flows to an address that it loses end, too, if a part of that write fails."""
    begin = [
        *(Step("service", (2, 2, 2, 2304)), Step("service", (1, 1, 2, 520))),
        Step("slice", (1, 0, 0, 6, 7, 0)),
        *(Step("deliver", (kind, 9)) for kind in (0, 1, 2)),
    ]
    moved = [Step("recreate", (1, 2, 1671)), Step("track", (657,)), Step("deliver", (0, 4))]
    for change in range(30):
        steps = [*begin, Step("fail", (change, 3, 1)), *moved]
        assert runner.run(steps).error is None, change


def test_a_policy_and_endpoints_that_change_at_once(runner: Runner) -> None:
    """A client keeps or gets the endpoint that it would with a kube-proxy that syncs the slices
    first.
    """
    schedules = map(changing_policies_and_endpoints, range(scaled(40)))
    assert {runner.run(steps).error for steps in schedules} == {None}


def test_a_schedule_is_replayed_exactly(runner: Runner) -> None:
    """The same seed makes the same changes."""
    failures = [runner.failure(seed) for seed in (1, 1)]
    assert failures[0] == failures[1]


def test_each_mistake_of_test_mutations_can_still_be_made() -> None:
    """The code that each deliberate bug replaces still exists; only the extended tests show that
    the bug is found.
    """
    for mistake in (*OF_THE_API, *OF_WRITES, *OF_ENDINGS, *OF_THE_HISTORY, *OF_CANARIES):
        with mistake():
            pass
