# SPDX-License-Identifier: Apache-2.0
"""Programs and rules of others on this node that handle the same traffic, for `ebpflb check`."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel.attach import cgroup_links, device_programs
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.node import routes
from ebpflb.model.packet_path import Engine
from ebpflb.plan.entries import Flags
from ebpflb.tools import kube_proxy, pod_replies
from ebpflb.tools.check_result import CheckResult
from ebpflb.tools.firewall import forwarding
from ebpflb.tools.firewall.survey import survey

_REPLIES = "replies of endpoints"
_RIGHTS = "grant CAP_SYS_ADMIN to look into pods"
_EACH_PACKET, _MOST = "rules for each packet", 3
_BY_HAND = "compare them yourself with docs/firewalls.md"


def results(
    state_directory: Path, cgroup: Path | None, engine: Engine, flags: Flags
) -> Iterator[CheckResult]:
    """``engine`` is the one to expect where no agent has run; ``flags`` are those of settings."""
    yield _other_hooks(state_directory, cgroup)
    yield from _other_filters(state_directory)
    yield _kube_proxy(state_directory)
    yield from _forwarding(state_directory)
    yield from _firewall(state_directory, engine, fast_forward="fast_forward" in flags)
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


def _firewall(
    state_directory: Path, engine: Engine, *, fast_forward: bool
) -> Iterator[CheckResult]:
    """Rules of netfilter that may not see requests to Services (docs/firewalls.md)."""
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
    yield _each_packet(surveyed.per_packet, fast_forward=fast_forward)


def _each_packet(rules: list[str], *, fast_forward: bool) -> CheckResult:
    """What makes --fast-forward unwise (docs/limits.md): rules, and routing by marks. They are no
    fault as long as it is off.
    """
    try:
        found = rules + [f"ip rule: fwmark {mark:#x}" for mark in sorted(routes.rule_marks())]
    except EbpflbError as error:
        return CheckResult(_EACH_PACKET, False, False, str(error), "")
    more = f"; {len(found) - _MOST} more" if len(found) > _MOST else ""
    detail = "; ".join(found[:_MOST]) + more if found else "none asks more than openings"
    if not fast_forward:
        detail += "; --fast-forward, which is off, would pass them by" if found else ""
        return CheckResult(_EACH_PACKET, True, False, detail, "")
    remedy = "they miss established flows: set --no-fast-forward" if found else ""
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
    """Of two load balancers at the same hook the second one only sees the first one's backend; what
    a program does is not known.
    """

    def foreign() -> Mapping[str, list[str]]:
        ours = state_dir.StateDir(state_directory).map_ids()
        return cgroup_links.foreign_programs(cgroup_links.cgroup_root(cgroup), ours)

    remedy = "find out what they do: a filter may refuse connections; run one load balancer only"
    return _foreign("other programs at the hooks", foreign, remedy)


def _other_filters(state_directory: Path) -> Iterator[CheckResult]:
    """Others' programs at a device may drop or redirect packets: requests and replies as they come
    in or leave, before ebpflb's translate them or after.
    """
    for part in ("before", "after"):

        def others(part: str = part) -> dict[str, list[str]]:
            found = device_programs.others_programs(state_dir.StateDir(state_directory))
            return found.before if part == "before" else found.after

        remedy = f"they run {part} ebpflb and may drop or redirect packets: find out what they do"
        yield _foreign(f"programs {part} ebpflb's at devices", others, remedy)


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
