# SPDX-License-Identifier: Apache-2.0
"""The two nodes of the cases; each has a target's proxy and an API server of its own."""

import itertools
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired

from ebpflb.errors import NodeError
from ebpflb.lab import cni, manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab, Process
from ebpflb.lab.manifests import Manifest
from tests.conformance.targets import Place, Target
from tests.kernel.node import nodes
from tests.kit.api_history import key
from tests.kit.api_server import FakeApiServer
from tests.kit.lab_cluster import TARGET
from tests.kit.two_nodes import Topology

MARKER = ["10.96.255.255", "fd00:96::ffff"]
SECONDS = 30.0


class Served(Topology):
    """``publish`` gives both API servers the same objects. A marker Service, whose port changes,
    shows when a proxy has followed. Raises NodeError if one does not.
    """

    def __init__(self, lab: Lab, folder: Path, target: Target, patience: float = SECONDS) -> None:
        """``patience`` is the number of seconds in which the proxies must follow a change."""
        super().__init__(lab, folder, cni.Bridge(hairpin=True))
        self._target, self._patience = target, patience
        self._servers: list[FakeApiServer] = []
        self._places: list[Place] = []
        self._proxies: list[Process] = []
        self._objects: dict[tuple[str, ...], Manifest] = {}
        self._ports = itertools.cycle(range(1000, 2000))

    def start(self) -> None:
        for node in (self.near, self.far):
            self._start(node)

    def publish(self, *said: Manifest | list[Manifest]) -> None:
        everything = [it for each in said for it in (each if isinstance(each, list) else [each])]
        if not any(it["kind"] == "Node" for it in everything):
            everything += [manifests.node(it.name, it.v4, it.v6) for it in (self.near, self.far)]
        port = next(self._ports)
        everything += self._marker(port)
        self._replace({(it["kind"], *key(it)): it for it in everything})
        pods = self.unhooked, self.there
        for place, proxy, pod in zip(self._places, self._proxies, pods, strict=True):
            for ip in MARKER:
                self._until_followed(place, proxy, partial(self.is_served, pod, (ip, port)))
            self._until_followed(place, proxy, partial(self._target.ready, place))

    def delete_all_flows(self) -> None:
        self.delete_connections()

    def close(self) -> None:
        """End the proxies, then the servers that they watch."""
        for proxy in self._proxies:
            proxy.send_signal(signal.SIGTERM)
        for proxy in self._proxies:
            try:
                proxy.wait(self._patience)
            except TimeoutExpired:
                proxy.kill()
        for place in self._places:
            self._target.clean(place)
        for server in self._servers:
            server.__exit__()
        super().close()

    def _start(self, node: Host) -> None:
        with nodes.entered(node.netns):
            server = FakeApiServer(token="")  # client-go sends none by HTTP; here is its socket
        self._servers.append(server.__enter__())
        server.put(manifests.node(node.name, node.v4, node.v6))  # kube-proxy asks for it at once
        folder = self.folder / node.name
        folder.mkdir(parents=True)
        place = Place(node, server.kubeconfig(folder), folder)
        self._places.append(place)
        with (folder / "log").open("w") as log:
            proxy = node.start(self._target.command(place), stdout=log, stderr=log)
        self._proxies.append(self.lab.keep(proxy))

    def _until_followed(self, place: Place, proxy: Process, served: Callable[[], bool]) -> None:
        """Wait for the proxies. Raises NodeError with the end of the proxy's log."""

        def is_over() -> bool:
            return bool(proxy.poll()) or served()

        name = f"{place.node.name}'s proxy"
        try:
            wait_until(f"{name} follows a change", is_over, self._patience)
            if proxy.poll():
                raise NodeError(f"{name} has ended with status {proxy.returncode}")
        except NodeError as error:
            said = (place.folder / "log").read_text()[-2000:]
            raise NodeError(f"{error}; its log ends with:\n{said}") from error

    def _marker(self, port: int) -> list[Manifest]:
        # The name changes too: a proxy must have read the Service and the slices.
        ports = [{"name": f"p{port}", "port": TARGET, "protocol": "UDP"}]
        return [
            manifests.service("zzz", MARKER, [{**ports[0], "port": port}]),
            manifests.endpoint_slice("zzz", "IPv4", self.endpoints(self.here), ports),
            manifests.endpoint_slice("zzz", "IPv6", self.endpoints(self.here, v6=True), ports),
        ]

    def _replace(self, objects: dict[tuple[str, ...], Manifest]) -> None:
        """Replace the objects of each kind; the marker, which is last, changes last."""
        for server in self._servers:
            for name in self._objects.keys() - objects.keys():
                server.delete(self._objects[name])
            for name, it in objects.items():
                if self._objects.get(name) != it:
                    server.put(it)
        self._objects = objects
