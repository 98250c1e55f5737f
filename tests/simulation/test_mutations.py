# SPDX-License-Identifier: Apache-2.0
"""The simulation finds every deliberate bug in the product."""

from collections.abc import Iterator
from itertools import chain

import pytest

from tests.simulation.api_mutations import OF_THE_API
from tests.simulation.canary_mutations import OF_CANARIES
from tests.simulation.ending_mutations import OF_ENDINGS
from tests.simulation.history_mutations import OF_THE_HISTORY
from tests.simulation.schedules import Runner
from tests.simulation.steps import (
    AT_ONCE,
    KEPT,
    SOON,
    changing_policies,
    claiming_a_canarys_frontends,
    deleting_a_service,
    draw,
    draw_api,
    losing_an_event,
    losing_conntrack,
    losing_netfilters_table,
    removing_endpoints,
)
from tests.simulation.write_mutations import OF_WRITES

MOST = 500  # schedules until it must be found
# For some mistakes.
MADE = [
    *(
        changing_policies(),
        losing_conntrack(),
        deleting_a_service(),
        claiming_a_canarys_frontends(),
        losing_netfilters_table(),
    ),
    *map(removing_endpoints, (AT_ONCE, SOON, KEPT)),
]
IN_THE_AGENT = [*OF_WRITES, *OF_ENDINGS, *OF_THE_HISTORY, *OF_CANARIES]


@pytest.fixture(params=OF_THE_API, ids=lambda mutation: mutation.__name__)
def broken_source(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


@pytest.fixture(params=IN_THE_AGENT, ids=lambda mutation: mutation.__name__)
def broken(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


def test_nothing_is_found_in_the_product_as_it_is(runner: Runner, api_runner: Runner) -> None:
    """Without a mutation nothing is found; otherwise the tests below would show nothing."""
    assert [runner.run(steps).error for steps in MADE] == [None] * len(MADE)
    assert api_runner.run(losing_an_event()).error is None
    assert [runner.run(draw(seed)).error for seed in range(10)] == [None] * 10
    assert [api_runner.run(draw_api(seed)).error for seed in range(10)] == [None] * 10


def test_is_found(runner: Runner, broken: None) -> None:
    """One of the first schedules, or a schedule made for a rare bug, finds the bug."""
    schedules = chain(MADE, map(draw, range(MOST)))
    assert any(runner.run(steps).error for steps in schedules)


def test_is_found_behind_an_api_server(api_runner: Runner, broken_source: None) -> None:
    """The bugs are in the source, and in the use of its lists."""
    schedules = chain([losing_an_event()], map(draw_api, range(MOST)))
    assert any(api_runner.run(steps).error for steps in schedules)
