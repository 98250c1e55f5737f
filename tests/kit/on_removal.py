# SPDX-License-Identifier: Apache-2.0
"""Services with the annotation on-removal, and connections whose clients are silent."""

from collections.abc import Callable
from contextlib import ExitStack
from socket import IPPROTO_TCP

from ebpflb.kernel.node import sock_diag
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import ON_REMOVAL_ANNOTATION
from tests.kernel.node import nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.sockets import Socket

SOON, LATE = "reset=0s", "reset=1h"  # no test lives to see an hour
Connect = Callable[[], tuple[Socket, str]]


def saying(said: list[Manifest], value: str | None) -> list[Manifest]:
    """Return the manifests with this value of the annotation in each Service; None means without
    it.
    """
    for each in said:
        if each["kind"] == "Service":
            each["metadata"]["annotations"] = {ON_REMOVAL_ANNOTATION: value} if value else {}
    return said


def terminating(said: list[Manifest], pod: Host) -> list[Manifest]:
    """Return the manifests with this endpoint terminating, but serving."""
    for each in said:
        for endpoint in each.get("endpoints", ()):
            if endpoint["targetRef"]["name"] == pod.name:
                endpoint["conditions"] = {"ready": False, "serving": True, "terminating": True}
    return said


def held(pod: Host) -> int:
    """Return the number of connections to the endpoint."""
    with nodes.entered(pod.netns), sock_diag.SockDiag() as diag:
        return sum(one.local[1] == TARGET for one in diag.connected(IPPROTO_TCP))


def is_idle(pod: Host) -> bool:
    return held(pod) == 0


def one_each(stack: ExitStack, connect: Connect, *names: str) -> dict[str, Socket]:
    """Return a connection to each of these endpoints; further connections are closed."""
    found: dict[str, Socket] = {}
    while len(found) < len(names):
        client, name = connect()
        if name in names and name not in found:
            found[name] = stack.enter_context(client)
        else:
            client.close()
    return found


def is_reset(client: Socket) -> bool:
    """Whether a waiting client sees the reset before its call times out."""
    try:
        client.recv(1)
    except (ConnectionAbortedError, ConnectionResetError):
        return True
    except TimeoutError:
        return False
    return False
