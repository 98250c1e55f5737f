# SPDX-License-Identifier: Apache-2.0
"""The actions of steps, each in a method with the step's name; and the source of objects that steps
drive.

Each kind of object has a cursor in its history: ``deliver`` sends the changes that follow it, so
the kinds reach the agent in any order relative to each other, as with separate watches.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING

from ebpflb.agent.loop import Stop
from ebpflb.errors import KernelError
from ebpflb.kernel.programs.loader import SECTIONS
from ebpflb.model.events import Kind
from tests.simulation.cluster import event_of, slice_name
from tests.simulation.kernel import SimMap
from tests.simulation.places import EXTERNAL_PORTS, FAMILIES, PORTS, node_port
from tests.simulation.steps import ALL_READY, Step

if TYPE_CHECKING:
    from tests.simulation.node import SimNode

KINDS = list(Kind)
VERSIONS = ((4,), (6,), FAMILIES)
_HOOKS = [hook.attach_type for hook in SECTIONS.values()]
# Maps that the agent writes and nothing else, of which an entry can be removed or changed.
_DAMAGED = ("services", "service_names", "backend_names", "cluster_ips", "node_addresses")
_COUNT = ("socket_places", "sockets", "sockets_full", "connections", "backend_loads")


class Happenings:
    """The actions of steps, and the agent's source, which starts with the agent."""

    def __init__(self, node: "SimNode") -> None:
        self.node = node
        self.cursors: dict[Kind, int | None] = {}
        self.away = 0
        self.missing: set[str] = set()  # pins that someone has removed

    def do(self, step: Step, until: float) -> None:
        """Repeat the action until it has happened, or the agent's time is over."""
        if step.name == "wait":
            self._wait(step, until)
        else:
            getattr(self, step.name)(*step.arguments)

    def while_away(self) -> None:
        """Do what happens before the next agent starts."""
        while self.away and self.node.steps:
            self.away -= 1
            self.do(self.node.steps.popleft(), float("inf"))
        self.away = 0

    def _wait(self, step: Step, until: float) -> None:
        end = self.node.now + step.arguments[0] / 1000
        self.node.now = min(end, until)
        if end > until:
            left = round((end - until) * 1000)
            self.node.steps.appendleft(Step("wait", (left,)))

    # The source

    def restart(self) -> None:
        self.cursors = dict.fromkeys(Kind)

    def start(self) -> None:
        from tests.simulation.node import devices

        self.node.put(devices(*sorted(self.node.kernel.devices)))

    def stop(self) -> None:
        pass

    def received(self) -> Mapping[str, float]:
        return {}

    def deliver(self, kind: int, count: int) -> None:
        """Send a list first, later up to ``count`` changes."""
        self._deliver(KINDS[kind], count)

    def _deliver(self, kind: Kind, count: int) -> None:
        if self.node.life is None:
            return
        cursor, cluster = self.cursors[kind], self.node.cluster
        if cursor is None:
            self.node.put(cluster.listed(kind))
            self.cursors[kind] = len(cluster.history[kind])
            return
        for change in cluster.history[kind][cursor : cursor + count]:
            self.node.put(event_of(kind, change))
            self.cursors[kind] = cursor = cursor + 1

    @property
    def is_current(self) -> bool:
        """Whether the agent has received everything."""
        return True

    @property
    def awaits_list(self) -> bool:
        """Whether only a list can bring the agent up to date."""
        return False

    def deliver_all(self) -> None:
        for kind in Kind:
            if self.cursors[kind] != len(self.node.cluster.history[kind]):
                self._deliver(kind, len(self.node.cluster.history[kind]))

    def relist(self, kind: int) -> None:
        """End the watch as after 410 Gone."""
        self.cursors[KINDS[kind]] = None
        self._deliver(KINDS[kind], 1)

    # The cluster

    def service(self, number: int, ip: int, ports: int, shape: int) -> None:
        self.node.cluster.put_service(number, ip, ports, shape)

    def policies(self, number: int, internal: int, external: int) -> None:
        self.node.cluster.put_policies(number, internal, external)

    def delete_service(self, number: int) -> None:
        self.node.cluster.delete(Kind.SERVICE, f"s{number}")

    def recreate(self, number: int, ip: int, shape: int) -> None:
        """Use the same name with another uid, and perhaps another address and other families."""
        self.delete_service(number)
        self.service(number, ip, len(PORTS), shape)

    def slice(
        self, number: int, part: int, families: int, ready: int, leaving: int, weight: int
    ) -> None:
        """Write slices in one family, or in each, as the API's controller does for both."""
        leaving &= ALL_READY ^ ready
        for version in VERSIONS[families]:
            self.node.cluster.put_slice(number, part, version, ready, leaving, weight)

    def delete_slice(self, number: int, part: int, family: int) -> None:
        name = slice_name(number, part, FAMILIES[family])
        self.node.cluster.delete(Kind.ENDPOINT_SLICE, name)

    # The node

    def fail(self, after: int, times: int, which: int) -> None:
        """Let some of the agent's changes of the kernel fail, starting from a later one."""
        from tests.simulation.node import ERRNOS

        self.node.fail_at = self.node.changes + after
        self.node.failures, self.node.errno = times, ERRNOS[which]

    def die(self, after: int, away: int) -> None:
        """Kill the agent at a later change."""
        self.node.die_at, self.away = self.node.changes + after, away

    def restart_agent(self, away: int) -> None:
        """End the agent in order; some steps later the next one starts."""
        if self.node.life:
            self.node.put(Stop())
            self.away = away

    def unpin(self, which: int) -> None:
        """Remove a pin, as another program may. The agent holds the object behind it.

        Pins of maps that count are left alone: if the agent dies before it sees the removal, the
        next agent counts on.
        """
        if self.node.life and self.node.serving:
            pins = sorted(it for it in self.node.kernel.pins if PurePath(it).name not in _COUNT)
            path = pins[which % len(pins)]
            self.node.kernel.pins.pop(path)
            self.missing.add(path)

    def lose_table(self) -> None:
        """Remove netfilter's table while no agent owns it."""
        if self.node.life is None:
            self.node.table.elements = None

    def detach(self, which: int) -> None:
        """Detach a hook, as another program does."""
        if self.node.life and self.node.serving:
            link = self.node.kernel.link_at(self.node.cgroup, _HOOKS[which % len(_HOOKS)])
            if link:
                link.target, self.node.detached = 0, True

    def damage(self, which: int, entry: int) -> None:
        """Remove an entry of a map, or change it."""
        name = _DAMAGED[which % len(_DAMAGED)]
        for opened in self.node.kernel.pins.values():
            if isinstance(opened, SimMap) and opened.name == name and opened.items():
                key, value = opened.items()[entry % len(opened.items())]
                if entry % 2:
                    opened.lib.map_delete(opened.place, key)
                else:
                    opened.update(key, value[:-1] + bytes([value[-1] ^ 1]))
                self.node.damaged = True
                self.node.clients.forget()
                self.node.tracked.forget()

    def device(self, which: int) -> None:
        """Add a second device, or remove it."""
        from tests.simulation.node import devices

        found = {1, 2} if which else {1}
        self.node.kernel.devices = found
        if self.node.life:
            self.node.put(devices(*sorted(found)))

    def open(self, which: int) -> None:
        """Let a client connect, and stay."""
        if self.node.can_look():
            self.node.clients.open(which)

    def track(self, which: int) -> None:
        """Open a UDP flow that conntrack translates."""
        if self.node.can_look():
            self.node.tracked.open(which, self.node.clients.expected)

    def fail_conntrack(self, times: int) -> None:
        """Let some requests to conntrack fail."""
        self.node.tracked.failures = times

    def flow(self, which: int) -> None:
        """Let a client whose packets this node forwards connect, and stay."""
        if self.node.can_look():
            self.node.clients.packets.open(which, self.node.now)

    def close(self, which: int) -> None:
        """End a flow of packets."""
        if self.node.can_look():
            self.node.clients.packets.close(which)

    def doctor(self, port: int, nodeport: int) -> None:
        """Start `ebpflb doctor`, which requests a canary."""
        if self.node.life:
            self.node.doctor.begin(node_port(nodeport, EXTERNAL_PORTS[port]))

    def renew(self) -> None:
        """Let doctor continue."""
        if self.node.life:
            self.node.doctor.renew()

    def end_doctor(self) -> None:
        if self.node.life:
            self.node.doctor.end()

    def sweep(self) -> None:
        """Remove flows that were idle for too long."""
        if self.node.life and self.node.serving:
            with suppress(KernelError):
                self.node.life.sweep(self.node.library.lib.end_flow)
