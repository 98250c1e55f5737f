# SPDX-License-Identifier: Apache-2.0
"""Who counts as living, by what is heard."""

from ebpflb.plan.living_nodes import DEAD_AFTER, Beacon, Heard, LivingNodes

POOLS = b"same"
MAC = b"\x02\0\0\0\0\x01"


def heard(*, able: bool = True, pools: bytes = POOLS) -> LivingNodes:
    """This node has heard "two" at time 0."""
    nodes = LivingNodes("one", POOLS)
    nodes.heard(Beacon("two", able, b"", pools), MAC, 0.0)
    return nodes


def test_a_node_whose_beacons_stop_is_dead_unless_its_kernel_answers() -> None:
    """It is asked before that. Without its agent it is idle."""
    nodes, late = heard(), DEAD_AFTER + 0.1
    assert nodes.living(0.1) == Heard(fresh=frozenset({"two"}), agents=True)
    assert nodes.asked(["one", "two"], 0.1) == []
    assert nodes.asked(["one", "two"], 0.6) == ["two"]
    assert nodes.living(late) == Heard()
    nodes.answered("two", MAC, late)
    assert nodes.living(late) == Heard(idle=frozenset({"two"}))
    assert nodes.living(late + DEAD_AFTER) == Heard()


def test_a_node_that_was_never_heard_is_asked_once_a_second() -> None:
    """Its agent may not run. Once it has answered it is asked as often as others."""
    nodes = LivingNodes("one", POOLS)
    asked = [bool(nodes.asked(["one", "two"], 10 + tenths / 10)) for tenths in range(20)]
    assert sum(asked) == 2
    nodes.answered("two", MAC, 12.0)
    assert nodes.living(12.1).idle == {"two"}
    assert all(nodes.asked(["two"], 12 + tenths / 10) for tenths in range(20))


def test_an_agent_that_has_just_begun_gets_nothing_yet() -> None:
    assert heard(able=False).living(0.1) == Heard(idle=frozenset({"two"}), agents=True)


def test_an_agent_with_other_pools_owns_others_and_stops_writes() -> None:
    assert heard(pools=b"others").living(0.1) == Heard(
        idle=frozenset({"two"}), agents=True, mixed=True
    )


def test_silence_while_this_agent_did_not_run_does_not_count() -> None:
    """A busy machine: what came meanwhile waits, or was lost."""
    nodes = heard()
    nodes.excuse(5.0)
    assert nodes.living(5.1).fresh == {"two"}


def test_own_beacons_and_unknown_nodes_do_not_count() -> None:
    nodes = heard()
    nodes.heard(Beacon("one", able=True, cluster=b"", pools=POOLS), b"own", 0.0)
    assert nodes.living(0.1).all == {"two"}
    nodes.forget_others(frozenset({"one"}))
    assert nodes.living(0.1) == Heard() and not nodes.macs
