# SPDX-License-Identifier: Apache-2.0
"""The distribution of connections by each scheduler, for sockets and packets."""

from collections import Counter
from contextlib import ExitStack
from math import gcd

from tests.kit import chances, requests
from tests.kit.parameters import both_engines
from tests.kit.scheduled import ENDPOINTS, SENDS, WEB, dial, kinds, met, service, slices, weighted
from tests.kit.two_nodes import TwoNodes

pytestmark = both_engines


@kinds
def test_a_round_of_round_robin_has_each_endpoint_as_often_as_its_weight(
    two: TwoNodes, who: str, protocol: str, v6: bool
) -> None:
    """In any consecutive connections each endpoint comes exactly as often as its weight says, in
    the same order in every round.
    """
    its = dict(zip(ENDPOINTS, chances.UNEVEN, strict=True))
    two.publish(weighted(two, "round-robin", its.values()))
    part = gcd(*its.values())
    size = sum(its.values()) // part
    found = met(two, who, 3 * size, SENDS[protocol], v6=v6)
    assert Counter(found[:size]) == {name: weight // part for name, weight in its.items()}
    assert found == found[:size] * 3


def test_weight_0_drains(two: TwoNodes, opened: ExitStack) -> None:
    """An endpoint of weight 0 gets no new connections; an open one continues."""
    two.publish(service(two, "random", "there"))
    _, client = dial(two, "hooked", opened)
    two.publish(service(two, "random", "here"), slices(two, "there", 0))
    assert set(met(two, "hooked", 20) + met(two, "unhooked", 20)) == {"here"}
    assert client.getpeername()[:2] == (WEB.cluster[0], 80)
    assert requests.lives(client)
