# SPDX-License-Identifier: Apache-2.0
"""The tests of random draws: neither do right ones fail, nor wrong ones pass, but by a rare chance.

Both are counted out, over all outcomes.
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
    """Weights that are not there, or not in force, or count twice."""
    assert chance_to_pass(really, said) < 1e-3
