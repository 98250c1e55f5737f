# SPDX-License-Identifier: Apache-2.0
"""Which backend the next connection gets if the service's scheduler is not random."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import Choice, Range
from ebpflb.plan.tables import ALWAYS
from tests.native.node import NativeNode
from tests.publishing import frontend

WEB, OTHER = "172.30.0.1:80", "172.30.0.2:80"
TURN = "round_robin"


def backends(count: int) -> list[str]:
    return [f"10.1.0.1:{number}" for number in range(1, count + 1)]


@given(size=some.integers(1, 40), rounds=some.integers(1, 3), drawn=some.integers(0, 2**32 - 1))
def test_round_robin_is_an_exact_rotation(
    new_node: Callable[[], NativeNode], size: int, rounds: int, drawn: int
) -> None:
    """Each backend comes once in every round, in the same order; the first one is drawn at
    random.
    """
    node = new_node()
    node.kernel.dice = lambda: drawn
    node.publish(1, {WEB: TURN}, cluster=backends(size))
    met = [node.socket().connect(WEB).place for _ in range(rounds * size)]
    assert sorted(met[:size]) == sorted(backends(size))
    assert met == met[:size] * rounds
    assert met[0] == backends(size)[drawn * size >> 32]


def test_frontends_of_a_service_share_its_rotation(node: NativeNode) -> None:
    """All frontends of a service share one rotation.

    If there are as many connections as backends, each backend gets one.
    """
    node.publish(1, {WEB: TURN, OTHER: TURN}, cluster=backends(4))
    met = [node.socket().connect(to).place for to in (WEB, OTHER, WEB, OTHER)]
    assert sorted(met) == backends(4)


def test_the_lists_of_a_service_rotate_on_their_own(node: NativeNode) -> None:
    """If connections use two lists in turn, nothing is skipped in either list."""
    frontends = {WEB: TURN, OTHER: f"{TURN} local"}
    node.publish(1, frontends, cluster=backends(6), local=backends(2))
    met = [node.socket().connect(to).place for to in (WEB, OTHER) * 6]
    assert Counter(met[::2]) == dict.fromkeys(backends(6), 1)
    assert Counter(met[1::2]) == dict.fromkeys(backends(2), 3)


def test_a_change_of_the_backends_goes_on_with_the_rotation(node: NativeNode) -> None:
    node.publish(1, {WEB: TURN}, cluster=backends(3))
    for _ in range(4):
        node.socket().connect(WEB)
    for count in (5, 2, 4):
        node.publish(1, {WEB: TURN}, cluster=backends(count))
        met = [node.socket().connect(WEB).place for _ in range(count)]
        assert sorted(met) == backends(count)


def test_affinity_takes_no_turn(node: NativeNode) -> None:
    """A client that returns to its backend does not disturb the rotation."""
    node.publish(1, {WEB: TURN}, cluster=backends(3), affinity=60)
    clients = [node.socket(netns=number).connect(WEB).place for number in (1, 1, 2, 1, 3, 2)]
    assert sorted({*clients}) == backends(3)
    assert clients[0] == clients[1] == clients[3]
    assert clients[2] == clients[5]


def test_a_datagram_socket_takes_one_turn(node: NativeNode) -> None:
    """A datagram socket keeps its backend, so its further datagrams take no turn."""
    node.publish(1, {f"{WEB}/udp": TURN}, cluster=backends(2))
    one, other = node.socket("udp"), node.socket("udp")
    assert {one.sendmsg(WEB).place for _ in range(3)} == {backends(2)[0]}
    assert other.sendmsg(WEB).place == backends(2)[1]


def test_by_client_a_namespace_meets_one_backend(node: NativeNode) -> None:
    node.publish(1, {WEB: "by_client"}, cluster=backends(20))
    clients = [
        {node.socket(netns=netns).connect(WEB).place for _ in range(5)} for netns in range(1, 20)
    ]
    assert {len(met) for met in clients} == {1}
    assert len(set.union(*clients)) > 5


@pytest.mark.parametrize(
    ("words", "by_table"), [("by_tuple even", False), ("by_tuple", True), ("by_client", True)]
)
def test_a_socket_draws_of_a_table_only_where_weights_differ(
    node: NativeNode, words: str, by_table: bool
) -> None:
    """A socket draws from the table only if weights differ, or for affinity to clients; here all
    places of the table are the first backend's.
    """
    node.publish(1, {WEB: words}, cluster=backends(4))
    service = node.kernel.get("services", frontend(WEB))
    for at in range(7):
        node.put("choices", at, Choice(service.cluster.base, service.cluster.base, ALWAYS))
    node.put("services", frontend(WEB), service._replace(table=Range(0, 7)))
    met = {node.socket().connect(WEB).place for _ in range(100)}
    assert met == set(backends(4)[:1] if by_table else backends(4))


def test_each_list_draws_of_its_own_part_of_the_table(node: NativeNode) -> None:
    """The local list's part follows the cluster list's; here all places of a part are the same."""
    frontends = {WEB: "by_tuple", OTHER: "by_tuple local"}
    node.publish(1, frontends, cluster=backends(4), local=backends(2)[1:])
    service = node.kernel.get("services", frontend(WEB))
    for at in range(7):
        node.put("choices", at, Choice(service.cluster.base, service.cluster.base, ALWAYS))
        node.put("choices", at + 7, Choice(service.local.base, service.local.base, ALWAYS))
    for each in frontends:
        entry = node.kernel.get("services", frontend(each))
        node.put("services", frontend(each), entry._replace(table=Range(0, 7)))
    met = [{node.socket().connect(to).place for _ in range(50)} for to in frontends]
    assert met == [{backends(4)[0]}, {backends(2)[1]}]


@given(number=some.integers(0, 2**32 - 1), below=some.integers(0, 2**32 - 1))
def test_the_rest_of_a_draw_decides_between_the_two_slots_of_a_place(
    new_node: Callable[[], NativeNode], number: int, below: int
) -> None:
    """With one place in the table, the rest is the drawn number."""
    node = new_node()
    node.publish(1, {WEB: "by_tuple"}, cluster=backends(2))
    service = node.kernel.get("services", frontend(WEB))
    node.put("choices", 0, Choice(service.cluster.base, service.cluster.base + 1, below))
    node.put("services", frontend(WEB), service._replace(table=Range(0, 1)))
    node.kernel.dice = lambda: number
    assert node.socket().connect(WEB).place == backends(2)[number >= below]
