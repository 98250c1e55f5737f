# SPDX-License-Identifier: Apache-2.0
"""The HTTP servers of the running agent (kube-proxy.md 13 and 10).

10256 for load balancers and probes, 10249 for metrics and debugging, and a port for each Service
that has a health-check node port.
"""

from collections.abc import Collection

from ebpflb.cluster import recorder
from ebpflb.cluster.recorder import Recorder
from ebpflb.errors import NodeError
from ebpflb.model.addresses import Family
from ebpflb.options import Options
from ebpflb.serve.health import Health, OnResponse
from ebpflb.serve.listener import Connections, Listener, ServerThread
from ebpflb.serve.metrics_pages import MetricsPages
from ebpflb.serve.ports import LISTEN_RETRY_SECONDS, Port
from ebpflb.serve.service_health import ServiceHealth

MAX_PROBE_CONNECTIONS, MAX_SCRAPE_CONNECTIONS = 128, 32
START_ACTION = "StartKubeProxy"  # of all events at the start


class HttpServers:
    """The agent updates ``health`` and ``service_health`` between ``start`` and ``stop``."""

    def __init__(
        self,
        options: Options,
        events: Recorder,
        pages: MetricsPages,
        on_response: OnResponse = lambda path, code: None,
        *,
        families: Collection[Family] = tuple(Family),
        retry: float = LISTEN_RETRY_SECONDS,
    ) -> None:
        """``retry`` is in seconds. The agent is unhealthy if it lags by twice the sync period."""
        self._options, self._events, self._retry = options, events, retry
        self._node = recorder.node(options.node_name)
        self._thread = ServerThread()
        self.health = Health(2 * options.sync_period, families, on_response=on_response)
        self.service_health = ServiceHealth(
            self._thread,
            lambda: self.health.healthy,
            events,
            options.node_name,
            families,
            retry,
        )
        probes = Listener(self.health.respond, Connections(MAX_PROBE_CONNECTIONS))
        scrapes = Listener(pages.respond, Connections(MAX_SCRAPE_CONNECTIONS), slow=True)
        self._ports = {
            "FailedToStartProxierHealthcheck": self._port(
                "health server (--healthz-bind-address)", options.healthz_address, probes
            ),
            "FailedToStartMetricServer": self._port(
                "metrics server (--metrics-bind-address)", options.metrics_address, scrapes
            ),
        }

    def start(self) -> None:
        """Raises NodeError with the address and the reason if a required port cannot be opened.

        Then it has written an event too, and stopped everything again.
        """
        self._events.start()
        self._thread.start()
        self.health.synced()
        for reason, port in self._ports.items():
            try:
                self._thread.run(port.open())
            except NodeError as error:
                self._events.event(self._node, "Warning", reason, START_ACTION, str(error))
                self.stop()
                raise
        self._events.event(self._node, "Normal", "Starting", START_ACTION, "")

    def stop(self) -> None:
        """Closes everything. Harmless if it was never started, or is stopped already."""
        if self._thread.alive:
            self.service_health.close()
            for port in self._ports.values():
                self._thread.run(port.close())
        self._thread.stop()
        self._events.stop()

    def _port(self, name: str, address: str, listener: Listener) -> Port:
        required = self._options.bind_address_hard_fail
        return Port(name, address, listener, required=required, retry=self._retry)
