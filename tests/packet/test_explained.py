# SPDX-License-Identifier: Apache-2.0
"""`ebpflb explain` predicts the outcome of a packet, for random services and clients.

Each packet is first explained, and then handled by the programs in force.
"""

import random
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.entries.flows import Ends
from ebpflb.entries.services import Frontend
from ebpflb.kernel import recording
from ebpflb.kernel.maps.records import Affinity, AffinityKey
from ebpflb.kernel.node import routes
from ebpflb.kernel.recording import PrivateMaps, RecordingPrograms
from ebpflb.model.services import Protocol
from ebpflb.tools.explain.answer import copy_memory
from ebpflb.tools.explain.asking import OUTSIDE_CLIENT, Client, MapFacts
from ebpflb.tools.explain.ways import PacketWay, Way
from tests.kit import once
from tests.load import scaled
from tests.packet.conftest import Loaded
from tests.packet.frames import at
from tests.packet.node import FIRST_PORT, LAST_PORT, PacketNode
from tests.packet.places import V4, V6, Places
from tests.packet.services import KINDS, address, written
from tests.publishing import frontend

STORIES, PACKETS = scaled(60), 25  # 1,500 packets
CLIENTS = ("client", "other_client", "pod", "remote_pod", "here")


@pytest.fixture(scope="module")
def private(datapath: Loaded) -> Iterator[PrivateMaps]:
    with PrivateMaps(datapath[0]) as made:
        yield made


@pytest.fixture(scope="module")
def recorder(private: PrivateMaps, shared: Path, cache: Path) -> Iterator[RecordingPrograms]:
    with once.alone(shared), RecordingPrograms(private, cache) as made:
        yield made


class RandomServices:
    """Random services, and packets of random clients."""

    def __init__(self, seed: int, node: PacketNode, recorder: RecordingPrograms) -> None:
        self.random, self.node, self.recorder = random.Random(seed), node, recorder
        self.places: Places = self.random.choice([V4, V6])
        self.targets = [at(self.places.unallocated, 80), at(self.places.client, 80)]
        node.settings(*self._some("detect_local", "masquerade_all", "masquerade_here"))
        for number in range(1, 4):
            self._publish(number)
        self.facts = MapFacts(
            recorder.maps.pinned, Path("/"), frozenset(node.devices.values()), socket_hooks=False
        )

    def _some(self, *words: str) -> list[str]:
        return [word for word in words if self.random.random() < 0.5]

    def _publish(self, number: int) -> None:
        kind = list(KINDS)[number % len(KINDS)]
        self.protocol = self.random.choice(["tcp", "udp", "sctp"])
        backends = [at(getattr(self.places, it), 8080) for it in ("here", "there", "elsewhere")]
        cluster, local = self._some(*backends), self._some(backends[0])
        words = self._some("local passthrough", "local", "restricted")
        self.node.publish(
            number,
            {written(self.places, kind, self.protocol): " ".join((KINDS[kind], *words))},
            cluster=cluster,
            local=local,
            here=backends[:1],
            affinity=self.random.choice([0, 0, 60]),
        )
        if self.random.random() < 0.5:
            self.node.admit(number, self.places.clients, nodeport=int(kind == "nodeport"))
        self.targets += [f"{address(self.places, kind)}/{self.protocol}"] * 4
        self.targets.append(f"{at(self.places.cluster_ip, 99)}/{self.protocol}")

    def question(self) -> tuple[Frontend, Client, int]:
        who = ip_address(getattr(self.places, self.random.choice(CLIENTS)))
        port = self.random.choice([40_000, 40_001, *range(50_000, 50_400)])
        return (
            frontend(self.random.choice(self.targets)),
            Client(OUTSIDE_CLIENT, str(who), who),
            port,
        )

    def explained(self, asked: Frontend, client: Client, port: int) -> Way:
        maps = self.recorder.maps
        maps.empty()
        assert copy_memory(maps, self.facts, asked, client) == []
        return PacketWay(self.recorder, self.facts, asked, client, port).go()

    def happened(self, asked: Frontend, client: Client, port: int) -> tuple[str, Any]:
        """Return the verdict of the hook that decided, and the packet's addresses and ports as it
        left.
        """
        assert client.address is not None
        names = {index: name for name, index in self.node.devices.items()}
        came = routes.route_to(client.address).ifindex
        ends = Ends(client.address, asked.address, port, asked.port)
        first = self.node.ingress(
            recording.request_frame(ends, Protocol(asked.protocol)), names[came]
        )
        if first.action != "pass":
            return verdict_of(first.verdicts), None
        there = recording.ends_of(first.frame)
        out = routes.route_to(there.destination, client.address, came)
        if out.local or not out.ifindex:
            return verdict_of(first.verdicts), there if out.local else None
        left = self.node.egress(first.frame, names[out.ifindex], names[came])
        if left.action != "pass":
            return verdict_of(left.verdicts), None
        return verdict_of(first.verdicts), recording.ends_of(left.frame)


def verdict_of(counted: dict[str, int]) -> str:
    (verdict,) = counted.keys() - {"retried"}
    return verdict


def same_ends(explained: Ends | None, real: Ends | None) -> bool:
    """Whether addresses and ports are equal; a port that is drawn at random must be one of the
    candidates.
    """
    if explained is None or real is None or explained == real:
        return explained is real or explained == real
    ports = {explained.source_port, real.source_port}
    drawn = all(FIRST_PORT <= port <= LAST_PORT for port in ports)
    return drawn and explained._replace(source_port=0) == real._replace(source_port=0)


def test_packets_go_where_explain_says(node: PacketNode, recorder: RecordingPrograms) -> None:
    """Verdict, endpoint and masquerading agree with the prediction, with affinity and earlier
    flows.
    """
    met: set[str] = set()
    for seed in range(STORIES):
        fresh = PacketNode(node.maps, node.hooks, node.devices)
        services = RandomServices(seed, fresh, recorder)
        for _ in range(PACKETS):
            asked, client, port = services.question()
            explained = services.explained(asked, client, port)
            verdict, ends = services.happened(asked, client, port)
            noted = explained.noted.verdict if explained.noted else None
            assert noted == verdict, (seed, asked, client, port, explained)
            assert same_ends(explained.ends, ends), (seed, asked, client, port, explained, ends)
            met.add(verdict)
    if STORIES >= 60:
        assert met >= {
            "translated", "refused", "source_denied", "no_local_endpoint", "passed", "unallocated",
            "established", "passed_through",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("host", "seconds_ago", "says"),
    [
        ("there", 1, "remembers"),
        ("there", 61, "has expired"),
        ("here", 1, "is no longer available"),
        (None, 0, "no endpoint is remembered"),
    ],
)
def test_what_became_of_a_clients_affinity(
    node: PacketNode, recorder: RecordingPrograms, host: str | None, seconds_ago: int, says: str
) -> None:
    """A record is valid for 60 s while its endpoint is in the list in use; in this test it is
    not.
    """
    there, here = at(V4.there, 8080), at(V4.here, 8080)
    services = RandomServices(1, node, recorder)
    node.publish(
        9,
        [f"{V4.cluster_ip}:90"],
        cluster=[there, at(V4.elsewhere, 8080)],
        local=[here],
        here=[here],
        affinity=60,
    )
    client = Client(OUTSIDE_CLIENT, V4.pod, ip_address(V4.pod))
    assert client.address is not None
    if host is not None:
        backend = node.backend_id(9, at(getattr(V4, host), 8080))
        used = time.monotonic_ns() - seconds_ago * 1_000_000_000
        node.put("affinity", AffinityKey(0, client.address, 9), Affinity(used, backend))
    explained = services.explained(frontend(f"{V4.cluster_ip}:90"), client, 50_000)
    assert explained.noted
    (row,) = [row for row in explained.noted.rows if row.step == "affinity"]
    assert says in row.says
    assert host is None or at(getattr(V4, host), 8080) in row.says
