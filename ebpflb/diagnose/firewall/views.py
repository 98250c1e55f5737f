# SPDX-License-Identifier: Apache-2.0
"""What rules at a hook see of requests to a frontend: beside kube-proxy, and with ebpflb.

These are the tables of docs/firewalls.md, which tests/network/test_firewalls.py compares with
counters at the hooks.
"""

from typing import NamedTuple

from ebpflb.diagnose.firewall.matches import View
from ebpflb.diagnose.firewall.rules import NAT_DST, Chain
from ebpflb.diagnose.firewall.service_traffic import (
    FrontendKind,
    NodeState,
    TrafficEndpoint,
    TrafficFrontend,
)
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import Protocol

KUBE_MARK = 0x4000  # of what is to be masqueraded (--iptables-masquerade-bit)
_TRANSLATED_AT = -110  # priority of netfilter's table of ours in PREROUTING
_TRANSLATING = ("ingress", "prerouting", "output")  # where NAT of the destination happens, or later
_HOOKS = {
    True: ("output", "postrouting"),
    False: (*_TRANSLATING, "input", "forward", "postrouting"),
}


class Place(NamedTuple):
    """A hook; ``early``: NAT of the destination comes later; ``in_pod``: in a pod's namespace.

    ``unasked``: a chain of type nat in PREROUTING behind our own: that has translated already.
    """

    hook: str
    early: bool
    is_nat: bool
    in_pod: bool
    unasked: bool = False

    @property
    def of_sockets(self) -> bool:
        """What passes it comes from sockets of its own namespace."""
        return self.in_pod or self.hook == "output"


class Views(NamedTuple):
    """A request beside kube-proxy and with ebpflb.

    ``intended`` is what a rule that names the service is for, also where it never has matched.
    """

    before: View
    intended: View
    now: View


def place(chain: Chain, *, in_pod: bool) -> Place | None:
    """None: no request to a service passes this chain as the first one."""
    if chain.hook not in _HOOKS[in_pod]:
        return None
    nat_comes = chain.priority < NAT_DST or chain.is_nat
    early = in_pod or chain.hook == "ingress" or (chain.hook in _TRANSLATING and nat_comes)
    unasked = chain.is_nat and chain.hook == "prerouting" and chain.priority > _TRANSLATED_AT
    return Place(chain.hook, early, chain.is_nat, in_pod, unasked)


def views(
    at: Place, node: NodeState, frontend: TrafficFrontend, address: int, to: TrafficEndpoint
) -> Views | None:
    """Of a request to this address of the frontend; None: rules there see what they always saw."""
    untouched = _view(node, frontend, (address, frontend.port), (address, frontend.port))
    translated = _view(node, frontend, (to.address, to.port), (address, frontend.port))
    direct = _view(node, frontend, (to.address, to.port), (to.address, to.port))
    by_socket = _is_by_socket(at, node, frontend)
    if by_socket is None:
        return None
    by_flows = not by_socket and _on_flows(node, frontend)
    before = _kube_marked(at, untouched if at.early else translated)
    intended = untouched if at.early else _kube_marked(at, untouched._replace(dnat=True))
    now = direct if by_socket or by_flows or at.unasked else before
    return Views(before, intended, _marked(now, node) if by_flows else now)


def _is_by_socket(at: Place, node: NodeState, frontend: TrafficFrontend) -> bool | None:
    """Whether the client's socket is connected to the endpoint; None: not translated there at all.

    Clients outside ask all frontends but cluster IPs, which pods ask.
    """
    of_pods = at.in_pod or (not at.of_sockets and frontend.kind is FrontendKind.CLUSTER_IP)
    has_hook = frontend.protocol != Protocol.SCTP and not (of_pods and node.host_sockets)
    if at.of_sockets:
        return True if has_hook else None
    return of_pods and has_hook


def _on_flows(node: NodeState, frontend: TrafficFrontend) -> bool:
    return node.engine is Engine.FLOWS or frontend.needs_flows


def _view(
    node: NodeState,
    frontend: TrafficFrontend,
    destination: tuple[int, int],
    original: tuple[int, int],
) -> View:
    return View(
        frontend.family,
        frontend.protocol,
        *destination,
        destination[0] in node.own,
        *original,
        *destination,
        dnat=destination != original,
        mark_known=KUBE_MARK,
    )


def _kube_marked(at: Place, view: View) -> View:
    """kube-proxy and our own table mark where they translate what is to be masqueraded."""
    return view if at.early else view._replace(mark=KUBE_MARK)


def _marked(view: View, node: NodeState) -> View:
    mark, mask = node.mark
    return view._replace(mark=view.mark & ~mask | mark, mark_known=view.mark_known | mask)
