# SPDX-License-Identifier: Apache-2.0
"""Other software's programs, rules and routes that act on the same traffic, for `ebpflb check`."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from ebpflb.errors import EbpflbError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel.attach import cgroup_links, device_programs
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter import flowtable, nft
from ebpflb.kernel.netfilter.each_packet import marked_routes
from ebpflb.kernel.node.kube_proxy import ipvs_state
from ebpflb.tools import kube_proxy
from ebpflb.tools.firewall import forwarding
from ebpflb.tools.firewall.survey import survey
from ebpflb.tools.node_checks import OK, WARNING, CheckResult, judged

_RULES = "firewall rules"
_EACH_PACKET, _MOST = "rules for each packet", 3
_BY_HAND = f"compare them by hand with {DOCS}/firewalls.md"
_IF_NOT_WANTED = "if clients outside shall reach the Service, remove the rule"


def results(state_directory: Path, cgroup: Path | None) -> Iterator[CheckResult]:
    """Yield a result for each kind of neighbour."""
    yield _other_hooks(state_directory, cgroup)
    yield from _other_filters(state_directory)
    yield _kube_proxy(state_directory)
    yield from _ipvs()
    yield from _forwarding(state_directory)
    yield from _firewall(state_directory)


def _forwarding(state_directory: Path) -> Iterator[CheckResult]:
    """Yield whether pods get NodePort requests from clients outside, with and without kube-proxy's
    rules.
    """
    found = forwarding.dropping(state_directory)
    for each in found:
        yield CheckResult("forwarded packets", WARNING, f"{each.tool}: {each.says}", each.remedy)
    if not found:
        yield CheckResult("forwarded packets", OK, "accepted for pods of this node")


def _firewall(state_directory: Path) -> Iterator[CheckResult]:
    """Yield the rules of netfilter that drop requests to Services (docs/firewalls.md)."""
    try:
        surveyed = survey(state_directory)
    except (EbpflbError, OSError) as error:
        yield CheckResult(_RULES, WARNING, f"cannot be read: {in_words(error)}", _BY_HAND)
        return
    for rule in surveyed.dropping or ():
        yield CheckResult("firewall rule", WARNING, rule, _IF_NOT_WANTED)
    for line in surveyed.unread:
        yield CheckResult(_RULES, WARNING, line, _BY_HAND)
    if surveyed.dropping is None:
        yield CheckResult(_RULES, OK, "are compared with Services once an agent has run")
    elif not (surveyed.dropping or surveyed.unread):
        yield CheckResult(_RULES, OK, "none drops requests to Services")
    yield _each_packet(surveyed.each_packet)


def _each_packet(rules: list[str]) -> CheckResult:
    """Return the rules for each packet and the routing by marks, which a flowtable bypasses.

    These are a fault only if there is a flowtable.
    """
    try:
        found, bypassed = rules + marked_routes(), nft.exists(flowtable.TABLE)
    except EbpflbError as error:
        return CheckResult(_EACH_PACKET, WARNING, str(error))
    more = f"; {len(found) - _MOST} more" if len(found) > _MOST else ""
    detail = "; ".join(found[:_MOST]) + more if found else "none"
    if not bypassed:
        detail += "; --fast-forward, which is off, would bypass them" if found else ""
        return CheckResult(_EACH_PACKET, OK, detail)
    remedy = "established flows bypass them: set --fast-forward=off or auto"
    return judged(_EACH_PACKET, not found, detail, remedy)


def _other_hooks(state_directory: Path, cgroup: Path | None) -> CheckResult:
    """Return the other programs at the socket hooks.

    If two load balancers are at the same hook, the second one sees only the first one's choice. The
    function of such a program is unknown.
    """

    def foreign() -> Mapping[str, list[str]]:
        ours = StateDir(state_directory).map_ids()
        return cgroup_links.foreign_programs(cgroup_links.cgroup_root(cgroup), ours)

    remedy = "check what they do: a filter may refuse connections; run only one load balancer"
    return _foreign("other programs at the hooks", foreign, remedy)


def _other_filters(state_directory: Path) -> Iterator[CheckResult]:
    """Yield the other programs at the devices, which run before ours or after them.

    Such a program may drop or redirect requests and replies.
    """

    @cache
    def others() -> device_programs.OthersPrograms:
        return device_programs.others_programs(StateDir(state_directory))

    remedy = "they run {} ebpflb and may drop or redirect packets: check what they do"
    for part, programs in (("before", lambda: others().before), ("after", lambda: others().after)):
        feature = f"programs {part} ebpflb's at devices"
        yield _foreign(feature, programs, remedy.format(part))


def _foreign(
    feature: str, list_programs: Callable[[], Mapping[str, list[str]]], remedy: str
) -> CheckResult:
    try:
        found = list_programs()
    except (EbpflbError, OSError) as error:
        return CheckResult(feature, WARNING, in_words(error))
    names = ", ".join(f"{where} ({', '.join(programs)})" for where, programs in found.items())
    return judged(feature, not found, names or "none", remedy)


def _kube_proxy(state_directory: Path) -> CheckResult:
    """Return whether kube-proxy runs, as it may during a migration."""
    try:
        found = kube_proxy.detect(state_directory)
    except EbpflbError as error:
        return CheckResult("kube-proxy", WARNING, str(error))
    return judged("kube-proxy", not found.advice, found.state, found.advice)


def _ipvs() -> Iterator[CheckResult]:
    """Yield what kube-proxy's mode ipvs holds on this node, if it serves it, or did."""
    try:
        found = ipvs_state()
    except EbpflbError as error:
        yield CheckResult("IPVS", WARNING, str(error))
        return
    if found.summary:
        remedy = "its connections end when ebpflb starts: kube-proxy sets net.ipv4.vs.conntrack=1"
        yield judged("IPVS", "net/ipv4/vs/conntrack" in found.sysctls, found.summary, remedy)
