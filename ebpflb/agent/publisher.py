# SPDX-License-Identifier: Apache-2.0
"""Makes the agent's status of what the loop knows, and says it to those who wait for it.

Most turns of the loop change nothing of it: then nothing is made, told or written.
"""

from itertools import islice
from typing import TYPE_CHECKING, Any

from ebpflb.agent.reporter import Reporter
from ebpflb.model.drift import MAX_LISTED, Drift, in_force, named
from ebpflb.options import Options
from ebpflb.serve import status
from ebpflb.serve.origin import origin
from ebpflb.serve.status import rfc3339

if TYPE_CHECKING:
    from ebpflb.agent.loop import Agent


class Publisher:
    """Other threads may read ``status``, the one that was published last."""

    def __init__(self, options: Options, reporter: Reporter) -> None:
        begun = status.initial(node=options.node_name, source=options.source)
        self.status = begun.changed(
            origin=origin(options),
            socket_translation=options.socket_translation,
            left_to_kube_proxy=options.left_to_kube_proxy,
        )
        self._reporter = reporter
        self._file = status.StatusFile(options.paths)
        self._published: object = None  # what the status was made of

    def publish(self, drift: list[Drift], **fields: Any) -> None:
        """``fields`` are those of AgentStatus that the loop knows, all of them each time."""
        found = drift, fields
        if found != self._published:
            self.status = self.status.changed(drift=named(drift), **fields)
            self._reporter.published(self.status, in_force=in_force(drift))
            # What the file lacks, because it could not be written, is written in the next turn.
            self._published = found if self._file.write(self.status) else None


def fields_of(agent: "Agent") -> dict[str, Any]:
    """Those of AgentStatus that the loop knows, but the drift."""
    return {
        "programs": agent.loader.status,
        "fast_forward": agent.loader.fast_forward,
        "lists_complete": agent.cluster.complete,
        "last_received": {kind: rfc3339(at) for kind, at in agent.source.received().items()},
        "service_ports": agent.service_sync.service_ports,
        "backends": agent.service_sync.backends,
        "node_unknown": agent.reporter.check_node(agent.cluster, agent.options.source),
        "source_errors": dict(agent.source_errors),
        "invalid_objects": {
            f"{kind} {key}": reason for (kind, key), reason in agent.cluster.invalid.items()
        },
        "object_warnings": dict(islice(agent.cluster.warnings(), MAX_LISTED)),
        "contested": agent.service_sync.contested,
        "not_programmed": agent.service_sync.not_programmed,
        "reset_on_removal": agent.on_removal.watched_ports,
        "devices_not_served": agent.node_sync.not_served,
        "ports_not_open": agent.reporter.ports_not_open(),
        "ports_not_reserved": agent.ports_not_reserved,
        "sync_error": agent.sync_error,
        "stale_udp_error": agent.stale_udp.error,
        "packet_path": agent.node_sync.packet_path,
        "flowtable": agent.node_sync.flowtable.said
        if agent.node_sync.engine.is_netfilter
        else None,
        "kube_proxy": agent.kube_proxy,
        "kube_proxy_runs": agent.kube_proxy_runs,
        "attached": agent.node_sync.attached,
        "monitor": agent.node_sync.monitor,
        "in_sync": agent.in_sync,
        "audit_errors": agent.audit.errors,
    }
