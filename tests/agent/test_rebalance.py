# SPDX-License-Identifier: Apache-2.0
"""The agent moves idle connections slowly, and stops when it should."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from ebpflb.agent.loop import Turn
from ebpflb.agent.rebalance import MOST_A_TURN, RETRY_SECONDS, Rebalancer, in_turn
from ebpflb.errors import NodeError
from ebpflb.kernel.maps.records import QuietSocket
from ebpflb.kernel.quiet_sockets import ENDED, READY, ClientSocket, QuietSockets
from ebpflb.model.annotations import REBALANCE_ANNOTATION
from ebpflb.model.cluster_state import Applied
from ebpflb.model.events import Changed, Key, Kind
from tests.agent.fakes import Harness, Json, changed, lists, service, slices

OLD, NEW, THIRD = "10.1.0.1", "10.1.0.2", "10.1.0.3"
NETNS = 77


class FakeSockets(QuietSockets):
    """Sockets that are always ready to end, by backend; ``ended`` are those of each look."""

    out_of_reach: str | None = None

    def __init__(self) -> None:
        self.sockets: dict[int, int] = {}  # cookie -> backend
        self.known: dict[int, QuietSocket] = {}
        self.ended: list[int] = []
        self.failures: dict[int, int] = {}
        self.lacks = ""
        self.keeps = False  # an owner is always faster
        self.closed = 0

    def load(self) -> None:
        if self.lacks:
            raise NodeError(self.lacks)

    def close(self) -> None:
        self.closed += 1
        self.known.clear()

    def of(self, backends: Mapping[int, object]) -> Iterator[ClientSocket]:
        for cookie, backend in self.sockets.items():
            if backend in backends:
                yield ClientSocket(cookie, backend, NETNS)

    def watch(self, idle: Mapping[int, float]) -> None:
        assert {*idle.values()} <= {5.0}
        self.known = {it: self.known.get(it, QuietSocket(5, state=READY)) for it in idle}

    def look(self, netns: Iterable[int]) -> None:
        assert {*netns} <= {NETNS}
        wanted = [] if self.keeps else [it for it, known in self.known.items() if known.ends]
        self.known |= {it: self.known[it]._replace(state=ENDED) for it in wanted}
        self.ended.append(len(wanted))

    def states(self) -> dict[int, QuietSocket]:
        return dict(self.known)

    def want_ended(self, sockets: Mapping[int, QuietSocket], *, wanted: bool) -> None:
        self.known |= {it: known._replace(ends=int(wanted)) for it, known in sockets.items()}

    def forget(self, cookies: Iterable[int]) -> None:
        for each in cookies:
            del self.known[each]

    def count_failures(self, services: Collection[int]) -> dict[int, int]:
        return {each: self.failures.get(each, 0) for each in services}


class Moving:
    """An agent that serves a Service with one endpoint, and its worker."""

    def __init__(self, folder: Path) -> None:
        self.agent, self.quiet, self.now = Harness(folder), FakeSockets(), 1000.0
        self.errors: dict[str, str] = {}
        self.agent.start()
        self.worker = Rebalancer(
            self.quiet,
            self.agent.cluster,
            self.agent.inbox,
            lambda: self.agent.service_sync.planner.actual,
            lambda: self.errors,
            clock=lambda: self.now,
        )
        self.agent.send(*lists(wanting(), OLD))
        self.observe(serves=True)
        self.turn()

    def observe(self, *, serves: bool = False) -> None:
        """Tell the part that the Service has changed."""
        applied = Applied(1, frozenset(self.agent.cluster.services), {}, ())
        event = changed(Kind.SERVICE, wanting())
        self.worker.observe(Turn(applied=[(event, applied)], serves=serves))

    def publish(self, *events: Changed) -> None:
        self.agent.send(*events)
        self.observe()

    def scale(self, *ips: str) -> None:
        self.publish(changed(Kind.ENDPOINT_SLICE, slices("web", *ips)))

    def open(self, count: int, ip: str = OLD) -> None:
        (entries,) = self.agent.service_sync.planner.actual.values()
        pairs = zip(entries.ids, entries.backends, strict=True)
        (id,) = [id for id, backend in pairs if str(backend.address) == ip]
        first = len(self.quiet.sockets) + 1
        self.quiet.sockets |= dict.fromkeys(range(first, first + count), id)

    def turn(self) -> int:
        """Take a turn; return how many connections it ended."""
        before = self.worker.moved
        self.worker.turn()
        self.now += 1
        return self.worker.moved - before


def wanting(
    text: str | None = "idle=5s,above=20%", name: str = "web", ip: str = "10.96.0.1"
) -> Json:
    made = service(name, ip, {REBALANCE_ANNOTATION: text} if text else None)
    made["spec"]["ports"][0]["appProtocol"] = "http"
    return made


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[Moving]:
    made = Moving(tmp_path)
    yield made
    made.worker.stop()
    made.agent.stop()
    assert made.agent.error is None


def test_connections_leave_for_a_new_endpoint(moving: Moving) -> None:
    """One in a second, or a fiftieth; until none is a fifth beyond its share. What was ended
    counts no more, before its owner has closed it.
    """
    moving.open(100)
    assert [moving.turn() for _ in range(3)] == [0, 0, 0]
    moving.scale(OLD, NEW)
    assert [moving.turn() for _ in range(3)] == [2, 2, 2]
    moving.open(40, NEW)  # their owners have connected again
    assert [moving.turn() for _ in range(40)][-1] == 0
    assert moving.worker.moved < 60


def test_no_node_ends_many_in_a_second(moving: Moving) -> None:
    moving.open(4000)
    moving.scale(OLD, NEW)
    assert {moving.turn() for _ in range(20)} == {MOST_A_TURN}


@pytest.mark.parametrize("count", [1, 2])
def test_few_connections_stay(moving: Moving, count: int) -> None:
    """Fewer connections than endpoints are open on this node."""
    moving.open(count)
    moving.scale(OLD, NEW, THIRD)
    assert not any(moving.turn() for _ in range(5))


def test_nothing_moves_to_or_from_the_only_endpoint(moving: Moving) -> None:
    moving.open(50)
    moving.scale(NEW)
    assert not any(moving.turn() for _ in range(5))


def test_a_failed_connection_stops_it_until_there_is_another_endpoint(
    moving: Moving, caplog: pytest.LogCaptureFixture
) -> None:
    moving.open(100)
    moving.scale(OLD, NEW)
    assert moving.turn() == 2
    (entries,) = moving.agent.service_sync.planner.actual.values()
    moving.quiet.failures = {entries.id: 1}
    assert not any(moving.turn() for _ in range(5))
    assert caplog.text.count("default/web: connections stay: a new one could not be opened") == 1
    moving.quiet.failures.clear()
    assert not any(moving.turn() for _ in range(5))
    moving.scale(OLD, NEW, THIRD)
    assert moving.turn() > 0


def test_nothing_moves_while_the_api_is_away(moving: Moving) -> None:
    moving.open(100)
    moving.scale(OLD, NEW)
    moving.errors["https://192.0.2.1:6443/api"] = "no route to host"
    assert not any(moving.turn() for _ in range(5))
    assert not moving.quiet.known
    moving.errors.clear()
    assert moving.turn() == 2


def test_a_connection_whose_owner_is_faster_stays_and_may_end_later(moving: Moving) -> None:
    moving.open(100)
    moving.scale(OLD, NEW)
    moving.quiet.keeps = True
    assert moving.turn() == 0
    assert len(moving.quiet.known) == 100
    assert not any(known.ends for known in moving.quiet.known.values())
    moving.quiet.keeps = False
    assert moving.turn() == 2


def test_services_of_every_namespace_have_their_turn() -> None:
    """A tenant with a thousand Services, or ports, that want it keeps nobody else waiting."""
    services = [Key("busy", f"web-{i}") for i in range(1000)] + [Key("quiet", "web")]
    assert in_turn(dict.fromkeys(services, 1), 3) == [services[0], services[-1], services[1]]
    large = {Key(f"busy-{i}", "web"): 1000 for i in range(9)}
    assert in_turn(large | {services[-1]: 2}, 2010) == [services[-1], *[*large][:2]]


def test_a_service_that_wants_it_no_more_leaves_nothing(moving: Moving) -> None:
    for text, count in (("idle=5s,above=20%", 2), (None, 1)):
        moving.publish(changed(Kind.SERVICE, wanting(text, "other", "10.96.0.2")))
        moving.turn()
        assert len(moving.worker.movements) == count


def test_only_a_service_that_wants_it_wakes_the_thread(moving: Moving) -> None:
    """Without the annotation nothing is loaded, and changes wake nobody."""
    moving.publish(changed(Kind.SERVICE, wanting(None)))
    moving.quiet.lacks = "must not be loaded"
    moving.turn()
    assert not moving.worker.wanted.is_set()
    assert moving.quiet.closed
    moving.scale(OLD, NEW)
    assert not moving.worker.wanted.is_set()


def test_a_kernel_that_lacks_it_is_a_condition(moving: Moving) -> None:
    """It is tried again from time to time."""
    moving.quiet.lacks = "this kernel has no bpf_sock_destroy"
    moving.open(100)
    moving.scale(OLD, NEW)
    with pytest.raises(NodeError):
        moving.turn()
    assert moving.turn() == 0
    assert moving.worker.status() == {"not_rebalanced": "this kernel has no bpf_sock_destroy"}
    moving.quiet.lacks = ""
    moving.now += RETRY_SECONDS
    assert moving.turn() == 2
    assert moving.worker.status() == {"not_rebalanced": None}
    moving.quiet.out_of_reach = "those of pods"
    assert moving.turn() == 2
    assert moving.worker.status() == {"not_rebalanced": "those of pods"}
