# SPDX-License-Identifier: Apache-2.0
"""What a node observes itself, beside the cluster's objects: one row of FACTS for each fact.

Every watch of the node sends one message, ``Observed``, with all current values of its fact. Then
the Services that new and former values affect are planned again (ClusterState.observe).
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from ebpflb.model.endpoints import UnusedReason
from ebpflb.model.events import Key
from ebpflb.model.nodes import Rules

if TYPE_CHECKING:
    from ebpflb.model.cluster_state import ClusterState

Values = frozenset[Any]


class Fact(Enum):
    REACHED_SERVERS = auto()  # addresses and ports where the agent's requests reach the API
    OWN_ADDRESSES = auto()  # of this node
    ANSWERING_LISTENERS = auto()  # node-local listeners that answer
    UNTRACKED_DESTINATIONS = auto()  # that rules in raw exempt from conntrack
    DROPPED_DESTINATIONS = auto()  # by rules that packets do not pass if they are handed over
    FAILING_ENDPOINTS = auto()  # service ports with an endpoint that does not answer this node
    HANDED_NODES = auto()  # (family, name) of nodes that requests may be handed to


class Observed(NamedTuple):
    """A message to the agent's loop: all values that the fact has now."""

    fact: Fact
    values: Values


class FactRule(NamedTuple):
    """``affected``: the Services for which values matter that have come or gone.

    ``reason``: the values are service ports, each with an endpoint that is set aside for it.
    ``label`` names the fact in the history, and in the status if its values cannot be taken.
    """

    label: str
    affected: "Callable[[ClusterState, Values], set[Key]]"
    reason: UnusedReason | None = None


def _at_api_places(cluster: "ClusterState", _: Values) -> set[Key]:
    return cluster.renew_api_places()


def _with_listeners(cluster: "ClusterState", changed: Values) -> set[Key]:
    return cluster.node_local.naming(changed)


def _claiming(cluster: "ClusterState", changed: Values) -> set[Key]:
    """Return the Services that claim a frontend with such a rule."""
    find, claimed = Rules(changed).find, cluster.claimed()
    return {name.owner for frontend, names in claimed if find(*frontend) for name in names}


def _of_ports(_: "ClusterState", changed: Values) -> set[Key]:
    return {name.owner for name, _ in changed}


def _handed_over(cluster: "ClusterState", _: Values) -> set[Key]:
    return {key for key, its in cluster.services.items() if its and its[0].hands_over}


FACTS = {
    Fact.REACHED_SERVERS: FactRule("addresses of API servers", _at_api_places),
    Fact.OWN_ADDRESSES: FactRule("addresses of this node", _at_api_places),
    Fact.ANSWERING_LISTENERS: FactRule("which node-local listeners answer", _with_listeners),
    Fact.UNTRACKED_DESTINATIONS: FactRule("rules in raw", _claiming),
    Fact.DROPPED_DESTINATIONS: FactRule("rules that drop requests", _claiming),
    Fact.FAILING_ENDPOINTS: FactRule(
        "which endpoints do not answer this node", _of_ports, UnusedReason.SET_ASIDE
    ),
    Fact.HANDED_NODES: FactRule("nodes that requests may be handed to", _handed_over),
}
