# SPDX-License-Identifier: Apache-2.0
"""Programs and rules of others on this node that handle the same traffic, for `ebpflb check`."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ebpflb.datapath.attach import cgroup_links, device_programs
from ebpflb.datapath.maps import state_dir
from ebpflb.diagnose import forwarding, kube_proxy, pod_replies
from ebpflb.diagnose.check_result import CheckResult
from ebpflb.diagnose.firewall.survey import survey
from ebpflb.errors import EbpflbError, in_words
from ebpflb.model.packet_path import Engine
from ebpflb.node import policy_rules

_REPLIES = "replies of endpoints"
_RIGHTS = "grant CAP_SYS_ADMIN to look into pods"
_EACH_PACKET, _MOST = "rules for each packet", 3
_BY_HAND = "compare them yourself with docs/firewalls.md"


def results(state_directory: Path, cgroup: Path | None, engine: Engine) -> Iterator[CheckResult]:
    """``engine`` is the one to expect where no agent has run."""
    yield _other_hooks(state_directory, cgroup)
    yield _other_filters(state_directory)
    yield _kube_proxy(state_directory)
    yield from _forwarding(state_directory)
    yield from _firewall(state_directory, engine)
    yield from _replies(state_directory)


def _forwarding(state_directory: Path) -> Iterator[CheckResult]:
    """Whether pods get what clients outside ask NodePorts, with kube-proxy's rules and without."""
    found = forwarding.dropping(state_directory)
    for each in found:
        yield CheckResult(
            "forwarded packets", False, False, f"{each.tool}: {each.says}", each.remedy
        )
    if not found:
        yield CheckResult("forwarded packets", True, False, "accepted for pods of this node", "")


def _firewall(state_directory: Path, engine: Engine) -> Iterator[CheckResult]:
    """Rules of netfilter that do not see services as beside kube-proxy (docs/firewalls.md)."""
    try:
        surveyed = survey(state_directory, engine)
    except (EbpflbError, OSError) as error:
        yield CheckResult(
            "firewall rules", False, False, f"cannot be read: {in_words(error)}", _BY_HAND
        )
        return
    for rule, remedy in surveyed.found:
        yield CheckResult("firewall rule", False, False, rule, remedy)
    for note in surveyed.notes:
        yield CheckResult("firewall rules", False, False, note, _BY_HAND)
    if not (surveyed.found or surveyed.notes):
        yield CheckResult("firewall rules", True, False, f"none {surveyed.scope}", "")
    yield _each_packet(surveyed.per_packet)


def _each_packet(rules: list[str]) -> CheckResult:
    """What makes --fast-forward unwise (docs/limits.md): rules, and routing by marks."""
    try:
        found = rules + [f"ip rule: fwmark {mark:#x}" for mark in sorted(policy_rules.marks())]
    except EbpflbError as error:
        return CheckResult(_EACH_PACKET, False, False, str(error), "")
    more = f"; {len(found) - _MOST} more" if len(found) > _MOST else ""
    detail = "; ".join(found[:_MOST]) + more if found else "none asks more than openings"
    remedy = "with --fast-forward they miss established flows: leave it off" if found else ""
    return CheckResult(_EACH_PACKET, not found, False, detail, remedy)


def _replies(state_directory: Path) -> Iterator[CheckResult]:
    """Endpoints that answer only their node (docs/limits.md)."""
    try:
        found = pod_replies.misled(state_directory)
    except (EbpflbError, OSError) as error:
        yield CheckResult(
            _REPLIES, False, False, in_words(error), "grant CAP_SYS_ADMIN to see them"
        )
        return
    for line in found:
        yield CheckResult("replies of an endpoint", False, False, line, pod_replies.REMEDY)
    if not found:
        yield CheckResult(_REPLIES, True, False, "none leaves by another device", "")


def _other_hooks(state_directory: Path, cgroup: Path | None) -> CheckResult:
    """Two load balancers at the same hook: the second one only sees the first one's backend."""

    def foreign() -> Mapping[str, list[str]]:
        ours = cgroup_links.attached(state_dir.StateDir(state_directory)).values()
        return cgroup_links.foreign_programs(cgroup_links.cgroup_root(cgroup), ours)

    return _foreign(
        "other agents' hooks", foreign, "another agent translates services here too: run only one"
    )


def _other_filters(state_directory: Path) -> CheckResult:
    """Programs that run before ebpflb's at a device may drop or redirect its packets."""
    remedy = "they run before ebpflb and may drop or redirect packets: find out what they do"
    return _foreign(
        "programs before ebpflb's at devices",
        lambda: device_programs.programs_before_ours(state_dir.StateDir(state_directory)),
        remedy,
    )


def _foreign(
    feature: str, list_programs: Callable[[], Mapping[str, list[str]]], remedy: str
) -> CheckResult:
    try:
        found = list_programs()
    except (EbpflbError, OSError) as error:
        return CheckResult(feature, False, False, in_words(error), "")
    names = ", ".join(f"{where} ({', '.join(programs)})" for where, programs in found.items())
    return CheckResult(feature, not found, False, names or "none", remedy if found else "")


def _kube_proxy(state_directory: Path) -> CheckResult:
    """It may run at the same time during a migration."""
    try:
        found = kube_proxy.detect(state_directory)
    except EbpflbError as error:
        return CheckResult("kube-proxy", False, False, str(error), "")
    return CheckResult("kube-proxy", not found.advice, False, found.state, found.advice)
