# SPDX-License-Identifier: Apache-2.0
"""Tests of random draws rarely fail on correct draws, and rarely pass on wrong draws.

The two chances are computed over all outcomes.
"""

import pytest

from tests.kit.chances import EVEN, UNEVEN, chance_to_pass


@pytest.mark.parametrize("weights", [EVEN, UNEVEN])
def test_right_draws_fail_less_than_once_in_a_billion_times(weights: tuple[int, ...]) -> None:
    assert 1 - chance_to_pass(weights, weights) < 1e-9


@pytest.mark.parametrize(
    ("really", "said"),
    [((200, 100, 100), EVEN), (EVEN, UNEVEN), (UNEVEN, EVEN), ((100, 100, 25), UNEVEN)],
)
def test_wrong_draws_pass_less_than_once_in_a_thousand(
    really: tuple[int, ...], said: tuple[int, ...]
) -> None:
    """The draws are wrong because the weights are missing, ignored, or count twice."""
    assert chance_to_pass(really, said) < 1e-3
