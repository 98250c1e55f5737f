# SPDX-License-Identifier: Apache-2.0
"""The agent's words (status.py) as metrics: what serves, and what is wrong.

Services that are not programmed are named, but not more than NAMED of them: the map that is full
is the same for all, and `ebpflb status` has the rest.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from prometheus_client.core import GaugeMetricFamily, Metric

from ebpflb.datapath.maps.layout import layout_hash
from ebpflb.model.events import Kind
from ebpflb.serve.metrics_library import version
from ebpflb.serve.status import AgentStatus

NAMED = 50

_CURRENT = "current"


class WordsCollector:
    """Reads the words as they are; the agent goes on writing them."""

    def __init__(self, words: AgentStatus) -> None:
        self._words = words

    def collect(self) -> Iterable[Metric]:
        yield _build()
        yield from self._state()
        yield from self._services()
        yield self._refused()
        text = "1 for each source of objects that cannot be read at present"
        trouble = GaugeMetricFamily("ebpflb_source_trouble", text, labels=["source"])
        for source in list(self._words.troubles):
            trouble.add_metric([source], 1)
        yield trouble

    def _state(self) -> Iterator[Metric]:
        words = self._words
        for name, text, value in (
            ("lists_complete", "Whether every list has been received", words.complete),
            ("service_ports", "Service ports that are programmed", words.service_ports),
            ("backends", "Backends of all service ports", words.backends),
            ("devices_unattached", "Devices whose packets are not served", len(words.unattached)),
            (
                "programs_current",
                "Whether this agent's programs serve; 0: those of an earlier one",
                words.programs == _CURRENT,
            ),
            ("sync_failing", "Whether the last sync failed", words.failed is not None),
            (
                "masquerade_ports_reserved",
                "Whether the ports that we masquerade with are kept from others",
                words.unreserved is None,
            ),
        ):
            yield GaugeMetricFamily(f"ebpflb_{name}", text, value)

    def _services(self) -> Iterator[Metric]:
        ports = Counter(map(_service, list(self._words.unplaced)))
        text = "Services of which a port does not fit: its last good state stays"
        yield GaugeMetricFamily("ebpflb_services_not_programmed", text, len(ports))
        text = f"How many ports of a Service do not fit; of {NAMED} Services at most"
        each = GaugeMetricFamily(
            "ebpflb_service_not_programmed", text, labels=["namespace", "name"]
        )
        for service, count in islice(sorted(ports.items()), NAMED):
            each.add_metric(service, count)
        yield each

    def _refused(self) -> Metric:
        found = Counter(name.partition(" ")[0] for name in list(self._words.refused))
        text = "Objects that cannot be meant: their last good state stays"
        metric = GaugeMetricFamily("ebpflb_objects_refused", text, labels=["kind"])
        for kind in Kind:
            metric.add_metric([kind], found[kind])
        return metric


def _build() -> Metric:
    text = "Always 1: the version, and the layout of its maps"
    metric = GaugeMetricFamily("ebpflb_build_info", text, labels=["version", "layout"])
    metric.add_metric([version(), layout_hash()], 1)
    return metric


def _service(port: str) -> tuple[str, str]:
    """Namespace and name, of a service port's name."""
    namespace, _, name = port.partition(":")[0].partition("/")
    return namespace, name
