# SPDX-License-Identifier: Apache-2.0
"""Which nodes are held for silent: by agents in a network that loses packets, in virtual time."""

import random
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebpflb.model import node_members
from ebpflb.model.addresses import number
from ebpflb.model.node_health import (
    ASKED,
    CONFIRMED_SECONDS,
    MOST_ON_DEMAND,
    MOST_TOLD,
    PART,
    ROUND_SECONDS,
    TURN_SECONDS,
    NodeHealth,
    Suspicions,
    Verdict,
)
from ebpflb.model.node_members import Member, Members
from ebpflb.model.node_messages import Kind, Message
from tests.kit.node_network import Network, Node
from tests.model import builders

PROMISED = 3.0  # seconds
HOUR = 3600.0


def known(count: int, seed: int = 1) -> Network:
    """All nodes have answered each other."""
    network = Network(count, seed)
    network.run(6)
    return network


def holders(network: Network, about: Node) -> set[str]:
    """The nodes that hold a node for silent."""
    return {each.name for each in network.nodes if about.name in each.silent}


@pytest.mark.parametrize("count", [3, 4, 10, 40])
@pytest.mark.parametrize("seed", range(5))
def test_a_node_that_is_cut_off_is_noticed_in_time_and_when_it_answers(
    count: int, seed: int
) -> None:
    """By all others, however many; it itself holds no one for silent."""
    network = known(count, seed)
    dead, *others = network.nodes
    dead.side = 1
    network.run(PROMISED)
    assert holders(network, dead) == {each.name for each in others}
    assert not dead.silent
    dead.side = 0
    network.run(2.5)
    assert not holders(network, dead)
    assert {each.about for each in network.alarms} == {dead.name}


def test_a_paused_agent_is_no_silent_node() -> None:
    """Its kernel answers. Half of all agents are paused, and a node that dies is noticed."""
    network = known(12)
    dead, *others = network.nodes
    for each in others[:6]:
        each.is_paused = True
    network.run(20)
    assert not network.alarms
    dead.is_up = False
    network.run(PROMISED + 4)  # other agents may have to be asked
    assert holders(network, dead) == {each.name for each in others[6:]}


def test_if_no_asked_agent_answers_nothing_is_set_aside() -> None:
    network = known(6)
    for each in network.nodes[1:]:
        each.is_paused = True
    network.nodes[5].is_up = False
    network.run(60)
    assert not network.alarms


def test_two_nodes_hold_no_one_for_silent() -> None:
    network = known(2)
    network.nodes[1].is_up = False
    network.run(30)
    assert not network.alarms


def test_a_node_that_another_one_reaches_is_not_silent() -> None:
    """This node's way to it is broken, so the probe and the answers of others differ."""
    network = known(8)
    one, other = network.nodes[:2]
    network.broken = {frozenset({one, other})}
    network.run(60)
    assert not network.alarms


@pytest.mark.parametrize("count", [4, 9, 30])
def test_with_more_than_a_third_silent_this_node_is_the_cut_one(count: int) -> None:
    """So on the smaller side of a partition nothing is set aside for long, and on the larger one
    only if the smaller side has a third at most.
    """
    network = known(count)
    few = count // PART
    for each in network.nodes[:few]:
        each.side = 1
    network.run(10)
    assert not any(each.silent for each in network.nodes[:few])
    away = {each.name for each in network.nodes[:few]}
    assert all(each.silent == away for each in network.nodes[few:])
    network.nodes[few].side = 1
    network.run(10)
    assert not any(each.silent for each in network.nodes)


@pytest.mark.parametrize("drops", [{"echo"}, {"syn"}])
def test_a_node_that_answers_one_kind_of_probe_is_known_by_that(drops: set[str]) -> None:
    """A firewall drops the other kind on all nodes; who is cut off is noticed in time."""
    network = Network(10)
    for each in network.nodes:
        each.drops = frozenset(drops)
    network.run(20)
    assert network.nodes[1].health.counts == {"answering": 9, "silent": 0, "unknown": 0}
    assert not network.alarms
    dead, *others = network.nodes
    dead.side = 1
    network.run(PROMISED)
    assert holders(network, dead) == {each.name for each in others}
    dead.side = 0
    network.run(2.5)
    assert not holders(network, dead)


def test_a_node_that_has_answered_a_ping_gets_no_syn() -> None:
    network = known(6)
    for each in network.nodes:
        each.sent.clear()
    network.nodes[0].is_up = False
    network.run(10)
    network.nodes[0].is_up = True
    network.run(10)
    assert not any(each.sent["syn"] for each in network.nodes)


def test_a_node_that_never_answered_is_unknown() -> None:
    """As where a firewall drops all probes."""
    network = Network(6)
    network.nodes[0].is_up = False
    network.run(60)
    assert not network.alarms
    assert network.nodes[1].health.counts == {"answering": 4, "silent": 0, "unknown": 1}
    network.nodes[0].is_up = True
    network.run(2)
    assert network.nodes[1].health.counts == {"answering": 5, "silent": 0, "unknown": 0}


def test_a_process_that_was_stopped_judges_nothing_that_it_did_not_read() -> None:
    network = known(8)
    one = network.nodes[0]
    for _ in range(10):
        one.is_paused = True
        network.run(5)
        one.inbox.clear()  # the buffer was too small
        one.is_paused = False
        network.run(1)
    assert not network.alarms


def test_only_some_agents_tell_the_others() -> None:
    """So that not every agent writes Events about the same Services."""
    network = known(40)
    dead, *others = network.nodes
    dead.is_up = False
    network.run(PROMISED)
    noticed = [each for each in others if each.health.silent.noticed]
    assert 1 <= len(noticed) < 20


def test_a_node_that_left_the_list_is_forgotten_after_a_while() -> None:
    """Until then its agent may only be replaced, and a node that dies meanwhile is noticed."""
    network = known(6)
    dead, *others = network.nodes
    for each in others:
        network.list(each, frozenset({dead.name}))
    dead.is_up = False
    network.run(PROMISED)
    assert len(holders(network, dead)) == len(others)
    network.run(node_members.LEFT_SECONDS)
    assert not holders(network, dead)
    assert all(len(each.health.members) == len(others) - 1 for each in others)


def test_a_node_with_another_address_is_another_one() -> None:
    health = NodeHealth("here", random.Random(1))
    addresses = {"here": ip_address("10.0.0.1"), "there": ip_address("10.0.0.2")}
    health.set_nodes(addresses, 0.0)
    health.turn(0.0)
    health.set_nodes(addresses | {"there": ip_address("10.0.0.3")}, 1.0)
    assert [each.text for each in health.members] == ["10.0.0.3"]
    assert health.counts == {"answering": 0, "silent": 0, "unknown": 1}


def test_what_answers_no_probe_counts_for_nothing() -> None:
    """Neither a reply with another token, nor an agent's word that no one asked for."""
    network = known(5)
    dead, one = network.nodes[:2]
    dead.is_up = False
    network.run(PROMISED)
    one.health.answered(dead.text, 12345, network.now)
    one.health.told(
        network.nodes[2].text, Message(Kind.ALIVE, number(dead.address), 7), network.now
    )
    assert dead.name in one.silent
    alive = network.nodes[3]
    for asked in network.nodes:
        said = Message(Kind.MISSED, number(alive.address), 7)
        one.health.told(asked.text, said, network.now)
    network.run(2)
    assert alive.name not in one.silent


def test_others_cannot_have_a_node_probe_without_end() -> None:
    """Not more than MOST_ON_DEMAND a second, whatever they say."""
    network = Network(600)
    one = network.nodes[0]
    for each in [*one.health.members]:
        each.answered = 0.0
    one.health.turn(network.now)
    one.health.echoes.clear()
    for each in network.nodes[1:]:
        about = number(each.address)
        one.health.told(network.nodes[1].text, Message(Kind.SUSPECT, about), network.now)
        one.health.told(network.nodes[1].text, Message(Kind.ASK, about, 9), network.now)
    assert len(one.health.echoes) <= MOST_ON_DEMAND


def test_an_answer_is_one_datagram_for_each_question() -> None:
    network = known(5)
    one, asker, about = network.nodes[:3]
    for question in range(10):
        message = Message(Kind.ASK, number(about.address), question)
        one.health.told(asker.text, message, network.now)
    network.run(TURN_SECONDS)
    before = one.sent["mail"]
    network.run(2)
    assert one.sent["mail"] - before <= 10


def test_questions_go_to_a_few() -> None:
    network = known(40)
    sent = sum(each.sent["mail"] for each in network.nodes)
    network.nodes[0].is_up = False
    network.run(PROMISED)
    used = sum(each.sent["mail"] for each in network.nodes) - sent
    told = sum(bool(each.health.silent.noticed) for each in network.nodes)
    assert used <= 40 * (2 * ASKED + told) * 1.5


def test_a_node_that_is_cut_off_tells_all_others_of_a_few() -> None:
    """It misses all of them, and does not know at once that it is the cut one."""
    health, now = NodeHealth("here", random.Random(1)), 0.0
    nodes = {f"node-{n}": ip_address(0x0A000000 + n) for n in range(3000)}
    health.set_nodes({**nodes, "here": ip_address("192.0.2.1")}, now)
    while now < ROUND_SECONDS + 5:
        now += TURN_SECONDS
        health.turn(now)
        if now < ROUND_SECONDS + 1:
            for text, token in health.echoes:
                health.answered(text, token, now)
        health.echoes.clear()
    told = [message for whom, message in health.messages if whom is None]
    assert 0 < len(told) <= 2 * MOST_TOLD
    assert health.is_cut


def test_what_others_say_is_not_enough() -> None:
    """This node's own probe has to miss the node too; and who was not asked is not heard."""
    network = known(5)
    about, *others = (Member(it.name, it.text, number(it.address)) for it in network.nodes)
    members = Members("here", random.Random(1))
    members.set({it.name: it.address for it in network.nodes}, 0.0)
    suspicions = Suspicions(members, random.Random(1))
    suspicions.begin(about, 0.0)
    asked = suspicions.take_questions()
    assert len(asked) == ASKED <= len(others)
    for whom, question in asked:
        said = question._replace(kind=Kind.MISSED)
        assert suspicions.told(about, str(whom), said) is Verdict.OPEN
        stranger = suspicions.told(about, "10.9.9.9", said._replace(kind=Kind.ALIVE))
        assert stranger is Verdict.OPEN
    assert suspicions.missed(about, 1.0) is Verdict.SILENT


def test_a_silent_node_that_answers_others_is_used_again() -> None:
    """Though it does not answer this one."""
    network = known(8)
    one, other = network.nodes[:2]
    other.is_up = False
    network.run(PROMISED)
    network.broken = {frozenset({one, other})}
    other.is_up = True
    network.run(CONFIRMED_SECONDS + 3)
    assert not one.silent


def test_a_node_that_is_cut_off_does_not_say_that_others_are_silent() -> None:
    network = known(8)
    one, asker, about = network.nodes[:3]
    one.side = asker.side = 1
    network.run(6)
    before = one.sent["mail"]
    one.health.told(asker.text, Message(Kind.ASK, number(about.address), 7), network.now)
    network.run(3)
    assert one.health.is_cut
    assert one.sent["mail"] == before


FAULTS = st.one_of(
    st.tuples(st.just("up"), st.booleans()),
    st.tuples(st.just("pause"), st.booleans()),
    st.tuples(st.just("side"), st.integers(0, 2)),
    st.tuples(st.just("loss"), st.sampled_from([0.0, 0.05, 0.3, 0.9])),
    st.tuples(st.just("listed"), st.booleans()),
    st.tuples(st.just("drops"), st.frozensets(st.sampled_from(["echo", "syn"]))),
)
STEPS = st.lists(st.tuples(st.integers(0, 8), FAULTS, st.floats(0.0, 4.0)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(1, 1000))
def test_whatever_happens_the_bounds_hold(
    steps: list[tuple[int, tuple[str, Any], float]], seed: int
) -> None:
    """Never more than a third, never an unknown one, never oneself; and in the end all answer."""
    network = Network(9, seed)
    network.run(1.5)
    for place, (what, how), seconds in steps:
        node = network.nodes[place]
        match what:
            case "up":
                node.is_up = how
            case "pause":
                node.is_paused = how
            case "side":
                node.side = how
            case "loss":
                node.loss = how
            case "drops":
                node.drops = how
            case "listed":
                network.list(node, frozenset() if how else frozenset({"node-3"}))
        network.run(seconds)
        for each in network.nodes:
            keep_bounds(each)
    for node in network.nodes:
        node.is_up, node.is_paused, node.side, node.loss = True, False, 0, 0.0
        node.drops = frozenset()
    network.run(6)
    assert not any(each.silent for each in network.nodes)


def keep_bounds(node: Node) -> None:
    if not node.is_up or node.is_paused:
        return
    answered = {each.name for each in node.health.members if each.has_answered}
    assert node.silent <= answered
    assert node.name not in node.silent
    assert PART * len(node.silent) <= len(answered) + 1


def troubled(network: Network, minutes: int) -> None:
    """Each minute something else happens that is no node's death."""
    rng = random.Random(5)
    for _ in range(minutes):
        some = rng.sample(network.nodes, 4)
        some[0].is_paused = True
        some[1].loss = 0.2  # a flood on its link
        some[2].delay = 0.2  # of each packet
        for each in network.nodes:  # by a slow API they hear of this late, or never
            if rng.random() < 0.5:
                network.list(each, frozenset(it.name for it in rng.sample(network.nodes, 2)))
        network.run(rng.uniform(5, 40))
        some[0].is_paused, some[1].loss, some[2].delay = False, 0.0, 0.0005
        for each in network.nodes:
            network.list(each)
        network.run(10)


def test_no_false_alarm_in_some_minutes_of_trouble() -> None:
    """Of paused agents, lossy and slow links, replaced agents and a slow API."""
    network = known(12)
    troubled(network, 5)
    assert not network.alarms


@pytest.mark.extended
def test_no_false_alarm_in_an_hour_of_trouble() -> None:
    network = known(16)
    begun = network.now
    while network.now - begun < HOUR:
        troubled(network, 10)
    assert not network.alarms


def test_nodes_and_the_port_are_read_from_the_agents_slices() -> None:
    """One address of each node, IPv4 if there are both, and none of endpoints without a node."""
    ports = [{"name": "nodes", "port": 10246, "protocol": "UDP"}]
    v4, v6 = (
        builders.stored(builders.slice(*entries, name=kind, family=kind, ports=ports))
        for kind, entries in {
            "IPv4": [builders.entry("10.0.0.1", nodeName="one"), builders.entry("10.0.0.9")],
            "IPv6": [
                builders.entry("fd00::1", nodeName="one"),
                builders.entry("fd00::2", nodeName="two"),
            ],
        }.items()
    )
    found = {"one": ip_address("10.0.0.1"), "two": ip_address("fd00::2")}
    assert node_members.addresses([v6, v4]) == found
    assert node_members.port([v6, v4]) == 10246
    assert node_members.port([]) == 0
