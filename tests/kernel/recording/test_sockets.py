# SPDX-License-Identifier: Apache-2.0
"""`ebpflb explain` predicts what a socket's connect() does.

Services, policies and affinities are random, clients are on the node and in a pod. This process is
in a cgroup whose hooks run, and in a network namespace of its own: its packets reach no one.
"""

import errno
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ebpflb.entries.services import Frontend, Prefix, Settings
from ebpflb.kernel import bpf, recording
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.readers import RememberedSockets
from ebpflb.kernel.node import namespaces
from ebpflb.kernel.programs.loader import Program
from ebpflb.kernel.recording import Answer, PrivateMaps, RecordingPrograms
from ebpflb.tools.explain.answer import copy_memory
from ebpflb.tools.explain.asking import POD_CLIENT, Client, MapFacts
from ebpflb.tools.explain.ways import Way, call
from tests.kit import once
from tests.load import scaled
from tests.packet.network import network_of_our_own
from tests.packet.node import prefix
from tests.publishing import Publisher, frontend, place

STORIES, CALLS = scaled(50), 40  # 2,000 connections
HOOKS = ("connect4", "connect6", "sock_release")
NODE, NODE6 = "192.0.2.1", "2001:db8:1::1"
CLUSTER, CLUSTER6 = "172.30.0.1", "fd00:30::1"
NONE = Prefix(IPv6Address(1), IPv6Address(0))


class Node(Publisher):
    def __init__(self, maps: dict[str, Map]) -> None:
        super().__init__()
        self.maps = maps

    def put(self, name: str, key: Any, value: Any) -> None:
        self.maps[name].write([(key, value)])


class RandomServices(NamedTuple):
    recorder: RecordingPrograms
    facts: MapFacts
    targets: list[Frontend]
    client: Client


@pytest.fixture(scope="module")
def namespace() -> Iterator[int]:
    """Return the cookie of a network namespace of our own."""
    with network_of_our_own():
        cookie = namespaces.cookie(namespaces.OWN_NETNS)
        if cookie is None:
            pytest.skip("this kernel does not tell a namespace's cookie")
        yield cookie


@pytest.fixture
def hooked(inside: Path, loaded: list[Program]) -> Iterator[None]:
    with ExitStack() as opened:
        cgroup = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, cgroup)
        for program in loaded:
            if program.name in HOOKS:
                link = bpf.link_create(program.fd, cgroup, program.attach_type)
                opened.callback(os.close, link)
        yield


@pytest.fixture
def recorder(all_maps: dict[str, Map], shared: Path, cache: Path) -> Iterator[RecordingPrograms]:
    with PrivateMaps(all_maps) as maps, once.alone(shared), RecordingPrograms(maps, cache) as made:
        yield made


def random_services(
    seed: int, recorder: RecordingPrograms, maps: dict[str, Map], cookie: int
) -> RandomServices:
    """Yield random services; the namespace is the node's own, or a pod's."""
    chance, node = random.Random(seed), Node(maps)
    for name in ("services", "cluster_ips", "affinity", "source_ranges"):
        maps[name].delete([key for key, _ in maps[name].items()])
    is_node = chance.random() < 0.5
    flags = frozenset(["host_sockets"] if chance.random() < 0.2 else [])
    node.put(
        "settings",
        0,
        Settings(
            host_netns=cookie if is_node else cookie + 1,
            writes=0,
            flags=flags,
            first_port=40_000,
            last_port=44_999,
            pods_v4=NONE,
            pods_v6=NONE,
            span_v4=prefix("172.30.0.0/16"),
            span_v6=prefix("fd00:30::/112"),
            node_v4=ip_address(NODE),
            node_v6=ip_address(NODE6),
        ),
    )
    node.owns(NODE, NODE6)
    targets = [frontend(f"{CLUSTER}:99"), frontend("198.51.100.9:80"), frontend("172.30.9.9:80")]
    for number in range(1, 6):
        targets += _service(chance, node, number)
    facts = MapFacts(maps, Path("/"), frozenset(), socket_hooks=True)
    client = Client(POD_CLIENT, "this process", None, cookie, hooked=True)
    return RandomServices(recorder, facts, targets, client)


def _service(chance: random.Random, node: Node, number: int) -> list[Frontend]:
    v6, protocol = chance.random() < 0.4, chance.choice(["tcp", "udp"])
    is_external = chance.random() < 0.5
    any_host, host = ("[::]", f"[{NODE6}]") if v6 else ("0.0.0.0", NODE)
    cluster_host = f"[{CLUSTER6}]" if v6 else CLUSTER
    port = 30_000 + number
    names = [f"[fd00:244::{i}]:8080" if v6 else f"10.244.9.{i}:8080" for i in range(1, 6)]
    flags = [word for word in ("local", "restricted") if chance.random() < 0.3]
    written = f"{any_host if is_external else cluster_host}:{port}/{protocol}"
    node.publish(
        number,
        {written: " ".join([*flags, *(["external"] if is_external else [])])},
        cluster=chance.sample(names, chance.randint(0, 4)),
        local=chance.sample(names, chance.randint(0, 2)),
        affinity=chance.choice([0, 0, 3600]),
    )
    return [frontend(f"{host if is_external else cluster_host}:{port}/{protocol}")] * 2


class Done(NamedTuple):
    """The result of a connect(): its errno, and the backend that the socket got."""

    errno: int
    peer: str | None


def connect(maps: dict[str, Map], asked: Frontend) -> Done:
    kind = socket.SOCK_STREAM if asked.protocol == 6 else socket.SOCK_DGRAM
    family = socket.AF_INET6 if asked.address.version == 6 else socket.AF_INET
    with socket.socket(family, kind) as client:
        client.setblocking(False)
        failed = client.connect_ex((str(asked.address), asked.port))
        cookie = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, 57, 8), "little")  # SO_COOKIE
        known = RememberedSockets(maps).get(cookie)
    backend = known.peer if known and known.peer.backend else None
    peer = str(Frontend(backend.address, backend.port, 0)) if backend else None
    return Done(0 if failed == errno.EINPROGRESS else failed, peer)


def check(way: Way, shares: dict[str, float], done: Done) -> str:
    """Check that prediction and result agree; return the kind of outcome."""
    verdict = (way.noted.verdict if way.noted else None) or "passed"
    if way.answer is Answer.DENY:
        assert (done.errno, done.peer) == (way.errno or errno.EPERM, None)
    elif verdict == "translated":
        assert sum(shares.values()) == pytest.approx(1)
        assert shares[done.peer or ""] > 0
    else:
        assert done.peer is None
    return f"{verdict} {way.answer}"


def test_sockets_go_where_explain_says(
    all_maps: dict[str, Map], recorder: RecordingPrograms, hooked: None, namespace: int
) -> None:
    """Prediction and connect() agree in answer and errno; the chosen endpoint has a chance, or
    comes from affinity.
    """
    met: set[str] = set()
    certain = 0
    for seed in range(STORIES):
        services = random_services(seed, recorder, all_maps, namespace)
        chance = random.Random(seed)
        for _ in range(CALLS):
            asked = chance.choice(services.targets)
            recorder.maps.empty()
            copy_memory(recorder.maps, services.facts, asked, services.client)
            way = call(recorder, services.facts, asked, services.client)
            noted = way.noted
            shares = (
                {
                    share.endpoint: share.chance
                    for share in services.facts.shares(noted.service, noted.candidates, noted.only)
                }
                if noted and noted.service and noted.candidates
                else {}
            )
            certain += 1.0 in shares.values() and len(shares) > 1
            met.add(check(way, shares, connect(all_maps, asked)))
    if STORIES >= 50:
        assert certain > 100
        assert {it.partition(" ")[0] for it in met} >= {
            "translated", "refused", "passed", "no_local_endpoint",
        }  # fmt: skip


def test_what_a_step_is_told_of(recorder: RecordingPrograms, all_maps: dict[str, Map]) -> None:
    """A call that no hook sees is left alone, and the steps say so."""
    all_maps["settings"].write([(0, all_maps["settings"].get(0)._replace(flags=frozenset()))])
    question = recording.SocketQuestion(Frontend(*place(f"{CLUSTER}:80"), 132), 1, 1)
    answer, found = recorder.call(question)
    assert answer is Answer.LEAVE
    assert [step.kind for step in found] == ["foreign", "answer"]
