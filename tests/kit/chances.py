# SPDX-License-Identifier: Apache-2.0
"""Whether counts of random draws fit their weights (Pearson's chi-square).

A test that fails by chance stops everything, so the limit is high: correct draws exceed it less
than once in 10^9 times, and draws in which an endpoint comes up twice as often as it should hardly
ever stay below it. tests/test_chances.py computes both.
"""

import math
from collections.abc import Mapping, Sequence

DRAWS = 1000
LIMIT = 55.0
EVEN, UNEVEN = (100, 100, 100), (100, 50, 25)  # the weights of three endpoints, by which is drawn


def chi_square(counts: Sequence[int], weights: Sequence[int]) -> float:
    """Return Pearson's chi-square: 0 if all counts are as expected; for three correct counts it is
    2 on average.
    """
    expected = _expected(sum(counts), weights)
    return sum((it - that) ** 2 / that for it, that in zip(counts, expected, strict=True))


def assert_drawn(counts: Mapping[str, int], weights: Mapping[str, int]) -> None:
    """Check that DRAWS names came up as often as the weights say, and no others."""
    assert tuple(weights.values()) in (EVEN, UNEVEN)
    assert sum(counts.values()) == DRAWS
    assert counts.keys() <= weights.keys()
    found = chi_square([counts.get(name, 0) for name in weights], [*weights.values()])
    assert found < LIMIT, (counts, weights)


def chance_to_pass(really: Sequence[int], said: Sequence[int]) -> float:
    """Return the chance that draws with the weights ``really`` are taken for draws with ``said``.

    It is the sum of the multinomial probabilities of all outcomes of three endpoints that pass.
    """
    logs = [math.log(weight / sum(really)) for weight in really]
    ways = [math.lgamma(number + 1) for number in range(DRAWS + 1)]
    one, two, _ = (_passing(each) for each in _expected(DRAWS, said))
    outcomes = ((a, b, DRAWS - a - b) for a in one for b in two if a + b <= DRAWS)
    return math.fsum(
        math.exp(ways[-1] + sum(n * log - ways[n] for n, log in zip(each, logs, strict=True)))
        for each in outcomes
        if chi_square(each, said) < LIMIT
    )


def _expected(draws: int, weights: Sequence[int]) -> list[float]:
    return [draws * weight / sum(weights) for weight in weights]


def _passing(expected: float) -> range:
    """Return the counts that pass; a higher count alone exceeds the limit."""
    off = math.sqrt(LIMIT * expected)
    return range(max(0, math.floor(expected - off)), min(DRAWS, math.ceil(expected + off)) + 1)
