# SPDX-License-Identifier: Apache-2.0
"""Set aside the endpoints on nodes that do not answer, and say so (--endpoint-health=nodes).

Called by the agent's loop only. The watch judges the nodes (node_watch.py). A Service loses all its
endpoints on silent nodes if it has ready ones on others.
"""

import logging
from collections.abc import Callable, Collection

from ebpflb import files
from ebpflb.agent.endpoint_health import in_words
from ebpflb.agent.node_watch import NodeWatch, Wanted
from ebpflb.cluster.event_recorder import object_limit
from ebpflb.errors import ConfigurationError
from ebpflb.errors import in_words as error_in_words
from ebpflb.files import UnusableFile
from ebpflb.history.segments import WriteCause
from ebpflb.model import node_members
from ebpflb.model.annotations import HEALTH_NODES
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoint_health import Place
from ebpflb.model.endpoint_slices import StoredSlice
from ebpflb.model.endpoints import UnusedReason, places
from ebpflb.model.events import Key
from ebpflb.model.node_health import NO_SILENT_NODES, SilentNodes
from ebpflb.model.node_messages import LEAST_KEY_BYTES
from ebpflb.model.services import PortName
from ebpflb.options import Options

log = logging.getLogger(__name__)

MOST_KEY_BYTES = 4096

_SILENT = (
    "node %s answers neither this node nor the agents that were asked: %d endpoints of %d Services"
    " get no new connections from this node until it answers"
)
_SET_ASIDE = "endpoints {} are set aside on this node and others: their node {} does not answer"


def read_key(options: Options) -> bytes | None:
    """Return the key that agents share, if there is one. Raises ConfigurationError."""
    path = options.node_health_key
    if path is None:
        if options.endpoint_health == HEALTH_NODES:
            raise ConfigurationError("--endpoint-health=nodes needs --node-health-key")
        return None
    try:
        key = files.read_regular(path, MOST_KEY_BYTES).strip()
    except (OSError, UnusableFile) as error:
        text = error_in_words(error)
        raise ConfigurationError(f"--node-health-key: {path}: {text}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigurationError(f"--node-health-key: {path} has less than {LEAST_KEY_BYTES} bytes")
    return key


class NodeHealthSync:
    """``watch``: None without a key, so that no Service can want it.

    ``agents`` is the Service whose endpoints are all nodes' agents. ``record`` makes an Event about
    a Service, and ``because`` a line of the history. Other threads may read ``count``, of endpoints
    that are set aside so now, and ``times``, how often one was.
    """

    def __init__(
        self,
        cluster: ClusterState,
        watch: NodeWatch | None,
        agents: Key,
        because: Callable[[WriteCause], None],
        record: Callable[[Key, str], None],
    ) -> None:
        self._cluster, self.watch, self._agents = cluster, watch, agents
        self._because, self._record = because, record
        self._may_record = object_limit().allows
        self._slices: tuple[StoredSlice, ...] | None = None
        self._silent = NO_SILENT_NODES
        self._aside: dict[Key, dict[PortName, frozenset[Place]]] = {}
        self.count = self.times = 0
        self.watching = False

    @property
    def error(self) -> str | None:
        """Why no nodes are probed, if they should be."""
        return self.watch.error if self.watch else None

    def turn(self) -> None:
        """Watch the nodes that agents run on; judge the endpoints of changed Services again."""
        self.watching = bool(self._cluster.by_nodes)
        if self.watch:
            self._set_watch(self.watch)
        if not self.watching:
            self._slices = None
        if self._silent.nodes or self._aside:
            self._update(
                self._cluster.changed_services & (self._cluster.by_nodes | self._aside.keys())
            )

    def take(self, message: SilentNodes) -> None:
        """Set aside what is on nodes that are silent now, and bring back what is on others."""
        before, self._silent = self._silent, message
        for node in sorted(before.nodes - message.nodes):
            log.info("node %s is not set aside any more", node)
            self._because(WriteCause("used again", "node", node))
        for node in sorted(message.nodes - before.nodes):
            self._because(WriteCause("does not answer", "node", node))
        self._update(self._with_endpoints_on(before.nodes ^ message.nodes))
        for node in sorted(message.nodes - before.nodes):
            self._say(node, is_first=node in message.noticed)

    def _set_watch(self, watch: NodeWatch) -> None:
        slices = self._cluster.slices_for(self._agents) if self.watching else None
        if slices != self._slices:
            self._slices = slices
            nodes = slices and Wanted(node_members.addresses(slices), node_members.port(slices))
            watch.set(nodes or None)

    def _with_endpoints_on(self, nodes: frozenset[str]) -> set[Key]:
        """Return the Services that are judged by nodes, and have endpoints on one of these."""
        return {
            slice.service
            for slice in self._cluster.slices.values()
            if slice.service in self._cluster.by_nodes
            and any(each.name.node in nodes for each in slice.endpoints)
        }

    def _update(self, services: Collection[Key]) -> None:
        for key in services:
            ports = self._cluster.services.get(key, ())
            by_nodes = [it.name for it in ports if it.endpoint_health == HEALTH_NODES]
            wanted = {name: its for name in by_nodes if (its := self._on_silent(name))}
            before = self._aside.pop(key, {})
            if wanted:
                self._aside[key] = wanted
            for name in before.keys() | wanted.keys():
                self._set(name, before.get(name, frozenset()), wanted.get(name, frozenset()))

    def _set(self, name: PortName, before: frozenset[Place], wanted: frozenset[Place]) -> None:
        if wanted != before:
            self._cluster.set_unhealthy(name, UnusedReason.NODE_SILENT, wanted)
            self.count += len(wanted) - len(before)
            self.times += len(wanted - before)

    def _on_silent(self, name: PortName) -> frozenset[Place]:
        """Return the ready endpoints on silent nodes; none if there are no others."""
        found = self._cluster.listed_endpoints(name)
        ready = [each for each in found if each.ready and each.weight]
        silent = [each for each in ready if each.name.node in self._silent.nodes]
        return places(silent) if len(silent) < len(ready) else frozenset()

    def _say(self, node: str, *, is_first: bool) -> None:
        """Log it. An Event of each Service only where it was noticed first: all nodes notice it."""
        lost = {key: its for key in self._aside if (its := self._lost(key, node))}
        log.warning(_SILENT, node, sum(map(len, lost.values())), len(lost))
        for key, its in lost.items():
            if is_first and self._may_record(key):
                self._record(key, _SET_ASIDE.format(in_words(its), node))

    def _lost(self, key: Key, node: str) -> frozenset[Place]:
        """Return the endpoints of a Service on this node that are set aside."""
        return frozenset(
            place
            for name, aside in self._aside[key].items()
            for place in places(
                it for it in self._cluster.listed_endpoints(name) if it.name.node == node
            )
            if place in aside
        )
