# SPDX-License-Identifier: Apache-2.0
"""Write to this node's Node whether Services work (--node-readiness, docs/node-readiness.md).

The API server gets few requests: a change is written at once, but no more than BURST at a time
and then one per BURST_SECONDS, and an unchanged condition every half an hour to an hour. A thousand
nodes write once in three seconds.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from ebpflb.agent.loop import Part
from ebpflb.cluster.decoding import RequestRejected
from ebpflb.cluster.event_recorder import MakeServer, RateLimit
from ebpflb.cluster.source import Backoff, Timing
from ebpflb.errors import EbpflbError, in_words, log_once
from ebpflb.model import nodes
from ebpflb.model.objects import Node
from ebpflb.options import Options
from ebpflb.redaction import redact
from ebpflb.serve.health import Health
from ebpflb.workers import PeriodicWorker

LOOK_INTERVAL = 1.0  # seconds between two looks at the readiness
BURST, BURST_SECONDS = 5, 30.0
HEARTBEAT = 1800.0  # seconds: this to twice this, so that nodes do not write together
REJECTED_PAUSE = 60.0  # seconds, unless the Node changes: without the right, or without a Node
WATCH_DELAY = 5.0  # seconds for the watch to show a Node without its taint

log = logging.getLogger(__name__)


class NodeReadiness(PeriodicWorker, Part):
    """``on_write`` is called after each write, with its success."""

    name = "node readiness"
    patience = 2.0  # seconds for the last write

    def __init__(
        self,
        options: Options,
        health: Health,
        make_server: MakeServer | None,
        on_write: Callable[[bool], None] = lambda success: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        timing: Timing | None = None,
    ) -> None:
        """``make_server``: None without an API server; ``clock``: monotonic, in seconds."""
        super().__init__(self.name, LOOK_INTERVAL, steady=True)
        self.error: str | None = None  # why the Node does not say what it should
        self._kind, self._health = options.node_readiness, health
        self._path = f"/api/v1/nodes/{quote(options.node_name, safe='')}"
        self._make_server = make_server
        self._on_write, self._clock = on_write, clock
        self._backoff = Backoff(timing or Timing())
        self._limit = RateLimit(BURST, BURST_SECONDS, clock)
        self._paused_until = -math.inf
        self._node: Node | None = None  # as of the last look
        self._is_rejected = False  # the last write
        self._written: nodes.Said | None = None
        self._created: str | None = None  # when the Node was, to which that was written
        self._heartbeat_due = -math.inf

    def start(self) -> None:
        if self._kind != nodes.OFF and self._make_server:
            super().start()
        elif self._kind != nodes.OFF:
            log.warning("--node-readiness has no effect: with --manifests no API server is asked")

    def run(self) -> None:
        super().run()
        if self._kind == nodes.CONDITION and self._written:
            self._send_condition(nodes.STOPPED)

    def turn(self) -> None:
        """Write what the Node lacks; after a refusal, try again at once if the Node has changed."""
        former, self._node = self._node, self._health.node
        is_new = self._is_rejected and self._node != former
        if self._clock() < self._paused_until and not is_new:
            return
        if self._kind == nodes.TAINT:
            self._remove_taint()
        else:
            self._update_condition()

    def status(self) -> Mapping[str, Any]:
        return {"node_not_written": self.error}

    def _update_condition(self) -> None:
        """A Node that was deleted and created again has lost the condition."""
        created = self._node.metadata.creation_timestamp if self._node else None
        if self._created and created != self._created:
            self._written = None
        said = nodes.READY if self._health.ready else nodes.NOT_READY
        is_due = said != self._written or self._clock() >= self._heartbeat_due
        if is_due and self._may_write() and self._send_condition(said):
            self._written, self._created = said, created
            self._heartbeat_due = self._clock() + HEARTBEAT * (1 + random.random())

    def _send_condition(self, said: nodes.Said) -> bool:
        return self._send(nodes.condition_patch(said, self._written, time.time()))

    def _remove_taint(self) -> None:
        patch = nodes.taint_patch(self._node) if self._node and self._health.ready else None
        if patch is None:
            self.error = None
        elif self._may_write() and self._send(patch):
            self._paused_until = self._clock() + WATCH_DELAY

    def _may_write(self) -> bool:
        """Whether the limit allows a write; while the server does not answer, only pauses limit."""
        has_failed = self.error is not None and not self._is_rejected
        return has_failed or self._limit.allows(None)

    def _send(self, patch: nodes.Patch) -> bool:
        """Send a patch; return whether it is written. If not, nothing is sent for a while."""
        path = self._path + patch.subresource
        try:
            assert self._make_server is not None
            self._make_server().patch(path, patch.content_type, patch.body)
        except (EbpflbError, OSError) as error:
            self._failed(error)
            return False
        self.error, self._is_rejected = None, False
        self._backoff.reset()
        self._on_write(True)
        return True

    def _failed(self, error: Exception) -> None:
        line, reason = "the Node's readiness cannot be written: %s", redact(in_words(error))
        self.error = log_once(log.warning, line, reason, self.error)
        self._is_rejected = isinstance(error, RequestRejected)
        pause = REJECTED_PAUSE if self._is_rejected else self._backoff.next()
        self._paused_until = self._clock() + pause
        self._on_write(False)
