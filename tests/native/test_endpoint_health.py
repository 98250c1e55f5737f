# SPDX-License-Identifier: Apache-2.0
"""The program socket_opening notes connections that open or fail."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ebpflb.kernel.maps.records import BackendHealth, ServiceBackend
from tests.native.node import HOST, OTHER_POD, POD, SECOND, NativeNode, Socket

WEB, OTHER = "172.30.0.1:80", "172.30.0.2:80"
ONE, TWO = "10.1.0.1:8080", "10.1.0.2:8080"
CONNECT, ESTABLISHED, RTO, STATE = 3, 4, 8, 10  # enum of linux/bpf.h: BPF_SOCK_OPS_..._CB
SYN_SENT, CLOSE, CLOSE_WAIT = 2, 7, 8  # BPF_TCP_...
WANTED = 1 | 4  # BPF_SOCK_OPS_RTO_CB_FLAG, _STATE_CB_FLAG
OTHERS_FLAG = 2
CLIENTS = POD, OTHER_POD, HOST, HOST + 9


def told(socket: Socket, op: int, **fields: Any) -> int:
    """Call the program as the kernel does; return the further calls that it requests."""
    context = socket.kernel.ffi.new("struct bpf_sock_ops *", {"op": op, **fields})
    assert socket.kernel.run("socket_opening", context, netns=1, cookie=socket.cookie) == 1
    return int(context.bpf_sock_ops_cb_flags)


def connecting(node: NativeNode, netns: int, to: str = WEB) -> Socket:
    socket = node.socket(netns=netns)
    socket.connect(to)
    told(socket, CONNECT)
    return socket


def opens(socket: Socket) -> None:
    told(socket, ESTABLISHED)


def is_unanswered(socket: Socket) -> None:
    told(socket, RTO, state=SYN_SENT, packets_out=1)


def is_refused(socket: Socket) -> None:
    told(socket, STATE, args=[SYN_SENT, CLOSE, 0, 0])


def is_closed(socket: Socket) -> None:
    told(socket, STATE, args=[SYN_SENT, CLOSE, 0, 0], packets_out=1)


def counted(node: NativeNode, service: int = 1, backend: str = ONE) -> BackendHealth | None:
    key = ServiceBackend(service, node.backend_id(service, backend))
    found: BackendHealth | None = node.kernel.get("backend_health", key)
    return found


def reached(node: NativeNode, *clients: int, to: str = WEB) -> None:
    for client in clients:
        opens(connecting(node, client, to))


def test_three_clients_that_reached_the_service_count(node: NativeNode) -> None:
    """Each client counts once; a connection that opens clears the failures, and is noted."""
    node.publish(1, [WEB], cluster=[ONE])
    reached(node, *CLIENTS)
    assert counted(node) is None
    is_unanswered(connecting(node, CLIENTS[0]))
    is_refused(connecting(node, CLIENTS[1]))
    is_unanswered(connecting(node, CLIENTS[2]))
    assert counted(node) == BackendHealth(node.kernel.now, *CLIENTS[:3])
    reached(node, CLIENTS[3])
    found = counted(node)
    assert found and found[1:] == (0, 0, 0, 1)


def test_a_client_of_another_service_is_unknown(node: NativeNode) -> None:
    node.publish(1, [WEB], cluster=[ONE])
    node.publish(2, [OTHER], cluster=[TWO])
    reached(node, POD, to=OTHER)
    is_refused(connecting(node, POD))
    assert counted(node) is None


def test_a_socket_that_its_owner_closes_has_not_failed(node: NativeNode) -> None:
    """A socket that its owner closes has not failed, nor has one that loses packets later or closes
    after it was open.
    """
    node.publish(1, [WEB], cluster=[ONE])
    reached(node, POD)
    is_closed(connecting(node, POD))
    open_socket = connecting(node, POD)
    told(open_socket, RTO, state=1, packets_out=1)
    told(open_socket, STATE, args=[CLOSE_WAIT, CLOSE, 0, 0])
    assert counted(node) is None


def test_only_connections_to_services_are_watched(node: NativeNode) -> None:
    """Our calls are requested in addition to those that other programs requested."""
    node.publish(1, [WEB, f"{WEB}/udp"], cluster=[ONE])
    served, direct, datagrams = node.socket(), node.socket(), node.socket("udp")
    served.connect(WEB)
    direct.connect("10.1.0.9:80")
    datagrams.connect(f"{WEB}")
    wanted = [
        told(it, CONNECT, bpf_sock_ops_cb_flags=OTHERS_FLAG) for it in (served, direct, datagrams)
    ]
    assert wanted == [OTHERS_FLAG | WANTED, OTHERS_FLAG, OTHERS_FLAG]
    opens(direct)
    assert not node.kernel.items("service_clients")


def test_failures_count_for_a_minute(node: NativeNode) -> None:
    node.publish(1, [WEB], cluster=[ONE])
    reached(node, *CLIENTS)
    for client in CLIENTS[:2]:
        is_refused(connecting(node, client))
    node.kernel.now += 61 * SECOND
    is_refused(connecting(node, CLIENTS[2]))
    assert counted(node) == BackendHealth(node.kernel.now, CLIENTS[2])


EVENTS = {"open": opens, "unanswered": is_unanswered, "refused": is_refused, "closed": is_closed}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(CLIENTS), st.sampled_from([ONE, TWO]), st.sampled_from(list(EVENTS))
        ),
        max_size=40,
    )
)
def test_any_sequence(
    new_node: Callable[[], NativeNode], sequence: list[tuple[int, str, str]]
) -> None:
    """The hooks agree with a few lines of Python about who last reached the service, and who
    failed.
    """
    node = new_node()
    reaching: set[int] = set()
    failed: dict[str, list[int]] = {}
    opened: set[str] = set()
    for client, backend, event in sequence:
        node.publish(1, [WEB], cluster=[backend])
        EVENTS[event](connecting(node, client))
        if event == "open":
            reaching.add(client)
            if backend in failed:
                opened.add(backend)
                failed[backend] = []
        elif event != "closed" and client in reaching:
            reaching.remove(client)
            clients = failed.setdefault(backend, [])
            if client not in clients[:2]:
                clients[2:] = [] if len(clients) < 3 else [client]
                clients += [client] if len(clients) < 3 else []
    for backend in (ONE, TWO):
        found = counted(node, backend=backend)
        if backend not in failed:
            assert found is None
            continue
        assert found
        noted = [it for it in (found.first, found.second, found.third) if it]
        assert (noted, bool(found.has_opened)) == (failed[backend], backend in opened)
