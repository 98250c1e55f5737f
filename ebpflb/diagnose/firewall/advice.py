# SPDX-License-Identifier: Apache-2.0
"""A finding in words: which rule it is and what it does not see, and what to do instead."""

from ebpflb.diagnose.firewall.matches import fields
from ebpflb.diagnose.firewall.rule_search import Finding, Why
from ebpflb.diagnose.firewall.rules import Does
from ebpflb.diagnose.firewall.service_traffic import FrontendKind, NodeState
from ebpflb.model.packet_path import Engine

_NETFILTER, _HOST_SOCKETS = "--packet-path=netfilter", "--socket-translation=host"
_OR = ", or "
_ENDPOINT = "match the endpoint's address and port"
_OF_CONNTRACK = {"dnat", "original_address", "original_port"}
_BY_SOURCE = {
    FrontendKind.NODEPORT: "--nodeport-source-ranges",
    FrontendKind.LOAD_BALANCER: "loadBalancerSourceRanges",
}
# For nodes where routing rules by mark choose the uplink of pods' replies (AWS VPC CNI).
BY_CLIENT = (
    "--reply-path=request-device, or lead replies by clients instead of the mark: ip rule add"
    " iif <pod's device> to <clients> lookup main, with a priority before the pods' own rules"
)


def line(finding: Finding) -> str:
    """Table, chain and rule, and the frontend that it is about."""
    title = finding.frontend.title if finding.frontend else ""
    hook = "" if finding.chain.lower() == finding.place.hook else f" ({finding.place.hook})"
    return (
        f"{finding.table.title}, chain {finding.chain}{hook}: {finding.rule.where}: "
        f"{finding.why.value} requests to {title}"
    )


def remedy(finding: Finding, node: NodeState) -> str:
    """What to do instead, as one line; without settings that are in force."""
    in_force = {_NETFILTER} if node.engine is Engine.NETFILTER else set()
    in_force |= {_HOST_SOCKETS} if node.host_sockets else set()
    ways = _remedy(finding, node).split(_OR)
    return _OR.join(way for way in ways if way not in in_force) or _ENDPOINT


def _remedy(finding: Finding, node: NodeState) -> str:
    """The ways, with _OR between them."""
    assert finding.frontend is not None
    match finding.why:
        case Why.REDIRECTED:
            return _HOST_SOCKETS
        case Why.DROPPED if finding.place.of_sockets:
            return f"accept services' endpoints before it, or {_ENDPOINT}"
        case Why.ACCEPTED:
            return f"{_by_source(finding)}{_OR}{_NETFILTER}"
        case Why.DROPPED:
            return f"accept before it what has the mark of --packet-mark{_OR}{_NETFILTER}"
    if finding.place.in_pod:
        return f"{_ENDPOINT}{_OR}{_HOST_SOCKETS}"
    if finding.place.hook == "output":
        return f"{_ENDPOINT}: sockets are connected to it"
    if finding.frontend.kind is FrontendKind.CLUSTER_IP and not node.host_sockets:
        engine = "" if node.engine is Engine.NETFILTER else f" and {_NETFILTER}"
        return f"{_ENDPOINT}{_OR}{_HOST_SOCKETS}{engine}"
    return _before_nat(finding, node) if finding.place.early else _after_nat(finding)


def _before_nat(finding: Finding, node: NodeState) -> str:
    """ebpflb has translated the request before it comes to the rule."""
    if finding.rule.does is Does.MARK:
        return f"{BY_CLIENT if _steers(finding, node) else _ENDPOINT}{_OR}{_NETFILTER}"
    if finding.place.is_nat or finding.rule.does is Does.NAT:
        return "give the rule an address or port that no service has: services come first"
    return f"{_by_source(finding)}{_OR}{_NETFILTER}"


def _steers(finding: Finding, node: NodeState) -> bool:
    """Whether a routing rule has the mark that the rule sets, or may have it."""
    bits = finding.rule.mark
    return any(not bits or mark & bits == mark for mark in node.policy_marks)


def _after_nat(finding: Finding) -> str:
    failing = frozenset[str]().union(*map(fields, finding.failing))
    if finding.place.is_nat:
        return _NETFILTER
    if "mark" in failing:
        return f"--packet-mark with kube-proxy's mark{_OR}{_NETFILTER}"
    if failing & _OF_CONNTRACK:
        return f"--packet-mark, and accept that mark{_OR}{_NETFILTER}"
    return f"it sees the endpoint, as beside kube-proxy: {_by_source(finding)}"


def _by_source(finding: Finding) -> str:
    """To admit or exclude clients; the endpoint can be matched in FORWARD, NetworkPolicy does."""
    assert finding.frontend is not None
    ranges = _BY_SOURCE.get(finding.frontend.kind)
    ways = f"{ranges} or NetworkPolicy" if ranges else "NetworkPolicy"
    return f"{ways}, or {_ENDPOINT} in FORWARD"
