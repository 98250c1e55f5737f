# SPDX-License-Identifier: Apache-2.0
"""The verdicts OK, DEGRADED and DOWN: their causes and texts."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ebpflb.model.nodes import Pulse
from ebpflb.options import Paths
from ebpflb.serve.conditions import OLD_AFTER, Cause, Facts, Verdict, judge, span
from ebpflb.serve.status import AgentStatus

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
PATHS = Paths(state=Path("/sys/fs/bpf/here"), run=Path("/run/here"))


def status(**more: Any) -> AgentStatus:
    made = AgentStatus(pid=7, node="n", source="s", started=NOW.isoformat(), lists_complete=True)
    return made.changed(**more)


def facts(published: AgentStatus | None, **more: Any) -> Facts:
    usual: dict[str, Any] = {"paths": PATHS, "runs": True, "socket_hooks": ["connect4"], "now": NOW}
    return Facts(published=published, **usual | more)


def test_ok_needs_an_agent_without_errors() -> None:
    """The verdict is OK only with a running agent, complete lists, no error and attached
    programs.
    """
    assert judge(facts(status(last_received={"Service": NOW.isoformat()}))) == (Verdict.OK, [])


@pytest.mark.parametrize(
    ("fields", "cause", "words"),
    [
        ({"programs": "those of an earlier start serve: no BCC"}, Cause.PROGRAMS, "no BCC"),
        ({"lists_complete": False}, Cause.LISTS, "nothing is written before then"),
        ({"node_unknown": 'no Node "x" in y'}, Cause.NODE_UNKNOWN, 'no Node "x" in y: /healthz'),
        ({"source_errors": {"api": "401"}}, Cause.SOURCE_ERRORS, "cannot be read: api: 401"),
        (
            {"source_errors": {"a": "x", "b": "y"}},
            Cause.SOURCE_ERRORS,
            "2 sources cannot be read, the first: a: x",
        ),
        ({"invalid_objects": {"Service a/b": "no"}}, Cause.INVALID_OBJECTS, "Service a/b: no"),
        ({"not_programmed": {"a/b": "map slots is full"}}, Cause.NOT_PROGRAMMED, "slots is full"),
        ({"address_conflicts": {"192.0.2.9": "x"}}, Cause.ADDRESS_CONFLICTS, "192.0.2.9: x"),
        ({"not_announced": "hears nobody"}, Cause.NOT_ANNOUNCED, "should be: hears nobody"),
        ({"devices_not_served": {"eth0": "busy"}}, Cause.DEVICES_NOT_SERVED, "eth0: busy"),
        ({"choices_lost": {"eth0": "lost"}}, Cause.CHOICES_LOST, "not translated: eth0: lost"),
        ({"drift": {"hook connect4": "is not attached"}}, Cause.DRIFT, "connect4: is not attached"),
        ({"audit_errors": {"pins": "no bpffs"}}, Cause.AUDIT_ERRORS, "pins: no bpffs"),
        (
            {"ports_not_open": {"health server": "0.0.0.0:10256: Address already in use"}},
            Cause.PORTS_NOT_OPEN,
            "a port of the agent is not open: health server: 0.0.0.0:10256: Address already in use",
        ),
        (
            {"left_to_kube_proxy": "all Services (--shadow)", "kube_proxy": "does not run: x"},
            Cause.KUBE_PROXY_MISSING,
            "kube-proxy does not run: x",
        ),
        (
            {"node_not_written": "403: forbidden"},
            Cause.NODE_NOT_WRITTEN,
            "does not say in the API whether Services work here: 403: forbidden",
        ),
        (
            {"addresses_missing": {"shop/web": "no pool has one", "shop/b": "no pool has one"}},
            Cause.ADDRESSES_MISSING,
            "2 load balancer addresses are missing, the first: shop/web: no pool has one",
        ),
        (
            {"hand_over_blocked": {"two": "192.0.2.12 gets nothing"}},
            Cause.HAND_OVER_BLOCKED,
            "are not kept, as a hand-over is blocked: two: 192.0.2.12 gets nothing",
        ),
        (
            {"removed_settings": {"--one": "was removed"}},
            Cause.REMOVED_SETTINGS,
            "a setting has no effect: --one: was removed",
        ),
        ({"udp_not_ended": "no space"}, Cause.UDP_NOT_ENDED, "may keep removed endpoints"),
        ({"not_rebalanced": "too old"}, Cause.NOT_REBALANCED, "do not move to new endpoints"),
        (
            {"failing_parts": {"sweep": "KeyError: 1"}},
            Cause.FAILING_PARTS,
            "a part of the agent fails: sweep: KeyError: 1",
        ),
        ({"sync_error": "map services: no space"}, Cause.SYNC_ERROR, "map services: no space"),
        (
            {"last_received": {"Node": (NOW - OLD_AFTER - timedelta(minutes=1)).isoformat()}},
            Cause.OLD_NEWS,
            "nothing received of Node for 5 min",
        ),
    ],
)
def test_each_problem_alone_is_degraded(fields: dict[str, Any], cause: Cause, words: str) -> None:
    """Each problem alone makes the verdict DEGRADED, and is named."""
    verdict, (reason,) = judge(facts(status(**fields)))
    assert (verdict, reason.verdict, reason.cause) == (Verdict.DEGRADED, Verdict.DEGRADED, cause)
    assert words in reason.text


@pytest.mark.parametrize("runs", [True, False])
def test_what_forward_drops(runs: bool) -> None:
    """If FORWARD drops packets now, that is a reason; if it only may drop them later, it is none,
    with or without an agent.
    """
    forwarding = {"iptables-nft: drops": True, "iptables-legacy: unknown": False}
    _, reasons = judge(facts(status(), runs=runs, forwarding=forwarding))
    found = [it.text for it in reasons if it.cause is Cause.NOT_FORWARDED]
    assert found == ["iptables-nft: drops"]


def test_ports_that_kube_proxy_has() -> None:
    """During a migration kube-proxy's ports are no fault."""
    taken = status(ports_not_open={"health server": "in use"}, kube_proxy_runs=True)
    assert judge(facts(taken)) == (Verdict.OK, [])


NO_FAULTS = {
    *("last_received", "kube_proxy", "ports_not_reserved", "packet_path", "options"),
    *("kept_for", "monitor", "flowtable"),  # the first is of those not programmed
    *("address_owners", "conntrack_liberal", "not_handed_to", "not_handed_at"),
    *("object_warnings", "claimed_twice", "set_aside"),  # a tenant's, of its own objects
}


def test_every_fault_that_an_agent_publishes_counts() -> None:
    """The verdict has every field of the status that names faults."""
    for name in AgentStatus.__struct_fields__:
        field = getattr(status(), name)
        if (field is None or field == {}) and name not in NO_FAULTS:
            wrong = {"x": "y"} if field == {} else "y"
            assert judge(facts(status(**{name: wrong})))[0] is Verdict.DEGRADED, name


def test_what_is_claimed_twice() -> None:
    """A frontend that is claimed twice is a fault if the operator writes manifests.

    With an API server it is no fault: otherwise any tenant could degrade every node.
    """
    twice = {"10.96.0.1:80/TCP": "default/web has it, not default/rival"}
    assert judge(facts(status(claimed_twice=twice)))[0] is Verdict.OK
    verdict, (reason,) = judge(facts(status(claimed_twice=twice, standalone=True)))
    assert (verdict, reason.cause) == (Verdict.DEGRADED, Cause.CLAIMED_TWICE)
    assert reason.text.endswith("10.96.0.1:80/TCP: default/web has it, not default/rival")


def test_a_full_conntrack() -> None:
    """With a full table the kernel drops new connections: DEGRADED with the numbers. Without a
    table, or with room in it, there is no reason.
    """
    verdict, (reason,) = judge(facts(status(), conntrack=(100, 100)))
    assert (verdict, reason.cause) == (Verdict.DEGRADED, Cause.CONNTRACK_FULL)
    assert "100 of 100 entries" in reason.text
    for room in ((0, 0), (98, 100)):
        assert judge(facts(status(), conntrack=room))[0] is Verdict.OK


def test_a_table_that_is_missing() -> None:
    """Without the table sockets are still served, so the verdict is DEGRADED."""
    verdict, reasons = judge(facts(status(), runs=False, table="the table was removed"))
    assert verdict is Verdict.DEGRADED
    assert [each.cause for each in reasons] == [Cause.NO_TABLE, Cause.NO_AGENT]


def test_pins_that_are_gone_under_an_agent() -> None:
    """The agent's programs serve while it runs: DEGRADED, and DOWN only after its end."""
    held = status(attached=True)
    verdict, (reason,) = judge(facts(held, socket_hooks=[]))
    assert (verdict, reason.cause) == (Verdict.DEGRADED, Cause.NO_SOCKET_HOOKS)
    assert "only until it stops" in reason.text
    assert judge(facts(held, socket_hooks=[], runs=False))[0] is Verdict.DOWN


def test_no_agent() -> None:
    """The programs keep serving: DEGRADED; the dead agent's status does not count."""
    left = status(source_errors={"api": "gone"}, lists_complete=False)
    verdict, (reason,) = judge(facts(left, runs=False))
    assert (verdict, reason.cause) == (Verdict.DEGRADED, Cause.NO_AGENT)
    assert "changes of Services are not applied" in reason.text


def test_no_agent_is_seen() -> None:
    """If programs serve without any status, the agent may have another run directory."""
    _, (reason,) = judge(facts(None, runs=False))
    assert reason.cause is Cause.NO_AGENT
    assert "/run/here" in reason.text and "--run-dir" in reason.text


def test_nothing_is_here() -> None:
    """The verdict is DOWN, and the searched folders are named."""
    verdict, (reason,) = judge(facts(None, runs=False, socket_hooks=[]))
    assert (verdict, reason.cause) == (Verdict.DOWN, Cause.NOTHING_HERE)
    assert "/sys/fs/bpf/here" in reason.text and "/run/here" in reason.text


def test_a_starting_agent_is_down_until_it_serves() -> None:
    """An agent that has published and attached nothing yet is DOWN."""
    verdict, (reason,) = judge(facts(None, socket_hooks=[]))
    assert (verdict, reason.cause) == (Verdict.DOWN, Cause.NO_SOCKET_HOOKS)


@pytest.mark.parametrize(
    ("fields", "cause", "words"),
    [
        ({"hangs": True}, Cause.NO_ANSWER, "the agent (pid 7) does not answer: changes"),
        ({"pulse": Pulse(silent=45.0)}, Cause.STALLED, "loop has not run for 45 s: changes"),
        ({"pulse": Pulse(waiting=12.4)}, Cause.LATE, "late: the oldest has waited for 12 s"),
    ],
)
def test_an_agent_that_does_not_apply_changes_now(
    fields: dict[str, Any], cause: Cause, words: str
) -> None:
    """The agent's published status does not show that it hangs; an ended agent has no pulse."""
    verdict, (reason,) = judge(facts(status(), **fields))
    assert (verdict, reason.cause) == (Verdict.DEGRADED, cause)
    assert words in reason.text
    assert judge(facts(status(), pulse=Pulse(silent=29.0, waiting=9.0))) == (Verdict.OK, [])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "119 min"),
        (7200, "2 h"),
        (172800, "2 d"),
    ],
)
def test_the_unit_is_the_largest_with_two(seconds: int, text: str) -> None:
    """A duration is shown in the largest unit of which there are at least two."""
    assert span(timedelta(seconds=seconds)) == text
