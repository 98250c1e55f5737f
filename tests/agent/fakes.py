# SPDX-License-Identifier: Apache-2.0
"""An agent with nothing real around it: the test says the events, the maps are dicts."""

import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ebpflb.agent import Agent
from ebpflb.agent.reporter import Reporter
from ebpflb.cluster import decoding
from ebpflb.cluster.source import Emit
from ebpflb.errors import EbpflbError
from ebpflb.lab import objects
from ebpflb.lab.agents import wait_until
from ebpflb.model.addresses import Address, Family
from ebpflb.model.devices import Devices
from ebpflb.model.events import Changed, Event, Key, Kind, ReadObject, Replaced, SourceStatus
from ebpflb.model.health_check import HealthCheck
from ebpflb.node.device_watch import DevicesChanged
from ebpflb.options import Options, Paths
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.plan import Plan
from ebpflb.plan.stale import Stale
from ebpflb.serve import status
from ebpflb.serve.health import Health
from ebpflb.serve.metrics import Metrics
from tests.plan.simulation import Maps, writes

Json = dict[str, Any]


class FakeDatapath:
    """Records what it is told; ``failures`` are raised by the next calls of ``apply``.

    Those of ``full`` are raised by ``hold``, by the name of the map.
    """

    def __init__(self) -> None:
        self.maps = Maps()
        self.plans: list[Plan] = []
        self.failures: list[EbpflbError] = []
        self.compile_error: EbpflbError | None = None
        self.hooked = False
        self.attached: list[Path] = []
        self.programs: list[str] = []
        self.leftovers: MapContents | None = None
        self.held: dict[str, dict[Any, Any]] = {}
        self.settings: dict[str, Any] = {}
        self.settings_at_plans: list[dict[str, Any]] = []
        self.served: list[Devices] = []
        self.unattached: list[dict[str, str]] = []
        self.restored: list[Devices] = []
        self.full: dict[str, EbpflbError] = {}
        self.unreadable: list[EbpflbError] = []

    def load(self, cache: Path) -> bool:
        if self.compile_error:
            raise self.compile_error
        self.programs = ["connect4"]
        return False

    def serves(self) -> bool:
        return self.hooked

    def set(self, chosen: dict[str, Any]) -> None:
        self.settings = dict(chosen)

    def present(self) -> MapContents:
        if self.unreadable:
            raise self.unreadable.pop()
        leftovers, self.leftovers = self.leftovers, None
        return leftovers or self.maps.read_back()

    def hold(self, name: str, wanted: dict[Any, Any]) -> None:
        if error := self.full.get(name):
            raise error
        self.held[name] = dict(wanted)

    def apply(self, plan: Plan) -> None:
        """A failing one has written the first half."""
        self.plans.append(plan)
        self.settings_at_plans.append(self.settings)
        rows = list(writes(plan))
        failure = self.failures.pop(0) if self.failures else None
        for part, row in rows[: len(rows) // 2] if failure else rows:
            self.maps.write(part, row)
        if failure:
            raise failure

    def attach(self, cgroup: Path, served: Devices) -> dict[str, str]:
        self.attached.append(cgroup)
        return self.follow(served)

    def follow(self, served: Devices) -> dict[str, str]:
        """Fails for whom the test says, once each."""
        self.served.append(served)
        return self.unattached.pop(0) if self.unattached else {}

    def restore(self, served: Devices) -> dict[str, str]:
        self.restored.append(served)
        if self.failures:
            raise self.failures.pop(0)
        return {}


class FakeSource:
    """Says nothing by itself."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.state = "made"

    def start(self) -> None:
        self.state = "started"

    def stop(self) -> None:
        self.state = "stopped"


class FakeFollower:
    """Says nothing by itself either."""

    def start(self) -> None:
        pass


class FakeChecks:
    """Health-check node ports that nobody can ask."""

    def __init__(self) -> None:
        self.wanted: list[Mapping[Key, HealthCheck]] = []
        self.addresses: list[Mapping[Family, Collection[Address]]] = []

    def update(
        self, wanted: Mapping[Key, HealthCheck], addresses: Mapping[Family, Collection[Address]]
    ) -> None:
        self.wanted.append({**wanted})
        self.addresses.append(addresses)


class FakeCure:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Stale] = []
        self.surveys = 0

    def ended(self, stale: Stale) -> None:
        self.told += [stale] if stale else []

    def survey(self) -> None:
        self.surveys += 1


class Stage:
    """The agent in a thread, and all that a test says to it and sees of it."""

    def __init__(self, folder: Path) -> None:
        paths = Paths(folder / "state", folder, folder)
        self.options = Options(paths, "node-1", folder / "cgroup", manifests=folder)
        self.datapath = FakeDatapath()
        self.health = Health(timeout=60)
        self.metrics = Metrics()
        self.checks = FakeChecks()
        self.cure = FakeCure()
        self.said = 0
        self.error: BaseException | None = None

    def start(self) -> None:
        reporter = Reporter(self.health, self.metrics, self.checks)  # type: ignore[arg-type]
        self.agent = Agent(self.options, self.datapath, FakeSource, reporter, self.cure)  # type: ignore[arg-type]
        self.agent.devices = FakeFollower()  # type: ignore[assignment]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def say(self, *events: Event | DevicesChanged) -> None:
        """Returns when the agent has taken them in and done what it could at once."""
        self.said += 1
        for event in (*events, SourceStatus("said", str(self.said))):
            self.agent.inbox.put(event)
        self.until(lambda words: words.troubles.get("said") == str(self.said))

    def until(self, true: Callable[[status.AgentStatus], object]) -> status.AgentStatus:
        """The first words of the agent of which this is true."""
        wait_until("the agent says so", lambda: bool(true(self.words)))
        return self.words

    @property
    def words(self) -> status.AgentStatus:
        return status.read(self.options.paths) or status.introduce(node="", source="")

    def stop(self) -> None:
        self.agent.stop()
        self.thread.join(10)

    def _run(self) -> None:
        try:
            self.agent.run()
        except BaseException as error:
            self.error = error


def found(kind: Kind, said: Json) -> tuple[Key, ReadObject]:
    converted = decoding.convert(kind, said)
    return decoding.key_of(converted), ReadObject(converted, "test.yaml")


def listed(kind: Kind, *said: Json) -> Replaced:
    return Replaced(kind, dict(found(kind, each) for each in said))


def changed(kind: Kind, said: Json) -> Changed:
    key, is_now = found(kind, said)
    return Changed(kind, key, is_now)


def service(name: str, ip: str) -> Json:
    return objects.service(name, [ip], [{"port": 80, "protocol": "TCP"}])


def slices(name: str, *ips: str) -> Json:
    endpoints = [objects.endpoint(ip, node="node-1", target=f"pod-{ip}") for ip in ips]
    return objects.endpoint_slice(name, "IPv4", endpoints, [{"port": 8080, "protocol": "TCP"}])
