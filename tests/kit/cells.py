# SPDX-License-Identifier: Apache-2.0
"""The results of clients on two nodes, as cells of a table.

A cell names the endpoints that answer, "here there"; "here=client there=node" also tells whom each
endpoint sees: the client, the far node, or the near node, by the address of the device that leads
to the endpoint. "one of here there" is one of them, the same one for all requests. With "lost" some
requests are not answered. REFUSED, SILENT and UNANSWERED are the result of all requests: an error
at once, neither an error nor an answer, or either of these.

A kind of frontend is one of ``Frontends``, or "loopback" for a NodePort on the node's own loopback;
"nodeport@far" is that of the far node, and "cluster+1" the port after the frontend's.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from ebpflb.lab import traffic
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kit import requests
from tests.kit.requests import Send
from tests.kit.sockets import CALL_SECONDS, Sockets
from tests.kit.two_nodes import Frontends, Topology, TwoNodes

# A service for each policy: its number, and what its spec says.
POLICIES: dict[str, tuple[int, dict[str, Any]]] = {
    "cluster": (10, {}),
    "external local": (20, {"externalTrafficPolicy": "Local"}),
    "internal local": (30, {"internalTrafficPolicy": "Local"}),
}
BOTH_CLIENT, BOTH_NODE = "here=client there=client", "here=node there=node"
HERE_CLIENT, HERE_NODE = "here=client", "here=node"
REFUSED, SILENT, UNANSWERED = "refused", "silent", "unanswered"

TIMES = 24  # misses one of two endpoints once in 8 million times
FEW = 6  # another endpoint that ought not to be chosen is missed once in 64 times
A_MOMENT = 0.3  # seconds after which a request counts as lost
LOST = ("lost", "")
FORBIDDEN = ("EPERM", "")  # of a datagram of the node itself that its rules drop or refuse
SAME = "one of "

Where = tuple[str, int]
Met = set[tuple[str, str]]  # names of endpoints, or what went wrong, and the sources that they see


class Row(NamedTuple):
    """The clients of a service, the kinds of frontends that they ask, and the result.

    ``kube_proxy`` is kube-proxy's cell, if it differs.
    """

    clients: str
    number: int
    kinds: str
    cell: str
    kube_proxy: str = ""


class Case(NamedTuple):
    """A state of the cluster, and the results of its clients.

    ``verdict`` is what the programs of the near node count for each request.
    """

    published: Callable[[Topology], list[Any]]
    rows: list[Row]
    verdict: str = ""


def rows(cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    """Yield case, client, service, kind of frontend, and cell, of all cases."""
    values = [
        (name, who, row.number, kind, row.cell)
        for name, case in cases.items()
        for row in case.rows
        for who in row.clients.split()
        for kind in row.kinds.split()
    ]
    names = ("case", "who", "number", "kind", "cell")
    return pytest.mark.parametrize(names, values, indirect=["case"])


def fixture(cases: Mapping[str, Case]) -> Any:
    """Return a fixture ``case`` for a file: the published case of this name."""

    @pytest.fixture(scope="module")
    def case(two: TwoNodes, request: pytest.FixtureRequest) -> Case:
        found = cases[request.param]
        two.delete_all_flows()
        two.publish(*found.published(two))
        return found

    return case


def services(two: Topology, *pods: Host) -> list[list[Manifest]]:
    """Return a service for each policy."""
    return [two.service(f"s{n}", n, *pods, **spec) for n, spec in POLICIES.values()]


def at(two: Topology, number: int, kind: str, *, v6: bool) -> Where:
    """Return the address at which the service of this number is reached by a kind of frontend."""
    if kind == "loopback":
        return ("::1" if v6 else "127.0.0.1"), Frontends(number).nodeport
    kind, _, more = kind.partition("+")
    kind, _, node = kind.partition("@")
    host, port = Frontends(number).to(kind, two.far if node == "far" else two.near, v6=v6)
    return host, port + int(more or 0)


def assert_cell(two: Topology, who: str, where: Where, cell: str, send: Send) -> None:
    """Check that requests of a client have exactly the result in the cell."""
    found = meet(two, who, where, cell, send)
    assert fits(two, who, where, cell, found), f"{cell}: {found}"


def meet(
    two: Topology, who: str, where: Where, cell: str, send: Send, seconds: float = CALL_SECONDS
) -> Met:
    """Return the results of a client's requests. Send as many as the cell needs, or until a request
    that should be answered gets no answer within ``seconds``.
    """
    client = two.sockets(getattr(two, who))
    is_lost = "lost" in cell or cell in (SILENT, UNANSWERED)
    if cell in (REFUSED, SILENT, UNANSWERED) and send is requests.udp:
        send = requests.connected_udp  # which is told of errors
    is_answered = not is_lost and cell != REFUSED
    times = TIMES if " " in cell else FEW if is_answered else 1
    found: Met = set()
    for _ in range(times):
        found.add(_met(client, where, send, A_MOMENT if is_lost else seconds))
        if not is_lost and LOST in found:
            break
    return found


def fits(two: Topology, who: str, where: Where, cell: str, found: Met) -> bool:
    """Whether the result is exactly the one in the cell."""
    if "=" in cell:
        return found == _meaning(two, who, cell, v6=":" in where[0])
    names = {name for name, _ in found}
    if cell == UNANSWERED:
        return not names & {"here", "twin", "there"}
    if cell.startswith(SAME):
        return len(names) == 1 and names <= set(cell.removeprefix(SAME).split())
    return names == ({LOST[0]} if cell == SILENT else set(cell.split()))


def _met(client: Sockets, where: Where, send: Send, seconds: float) -> tuple[str, str]:
    """Return the backend that answers in time and the source that it sees, LOST, or REFUSED."""
    with requests.socket_of(send, client, where[0]) as opened:
        opened.settimeout(seconds)
        try:
            if send is requests.udp:
                answer = requests.exchange(opened, *where)
                return answer.name, answer.source
            opened.connect(where)
            if send is requests.connected_udp:
                opened.send(b"?")
            return traffic.read(opened.recv(64))
        except TimeoutError:
            return LOST
        except ConnectionRefusedError:
            return REFUSED, ""
        except PermissionError:
            return FORBIDDEN
        except OSError as error:
            return str(error), ""


def _meaning(two: Topology, who: str, cell: str, *, v6: bool) -> Met:
    """Return the result that ``_met`` has for a cell that names sources."""
    client, near, far = (
        host.v6 if v6 else host.v4 for host in (getattr(two, who), two.near, two.far)
    )
    bridge = "fd00:244:1::1" if v6 else "10.244.1.1"
    sources = {"client": client, "far": far, "node": ""}
    words = [word.partition("=") for word in cell.split()]
    seen = {
        (name, sources[whom] or (bridge if name == "here" else near))
        for name, _, whom in words
        if whom
    }
    return seen | ({LOST} if "lost" in cell else set())
