# SPDX-License-Identifier: Apache-2.0
"""Services that say what becomes of connections, and connections whose clients are silent."""

from collections.abc import Callable
from contextlib import ExitStack

from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Socket
from ebpflb.model.annotations import ON_REMOVAL_ANNOTATION

SOON, LATE = "reset=0s", "reset=1h"  # no test lives to see an hour
SHORT = "reset=4s"  # longer than a change of the manifests takes
Connect = Callable[[], tuple[Socket, str]]


def saying(said: list[Manifest], value: str | None) -> list[Manifest]:
    """The same, with this value of the annotation in each Service; None: without."""
    for each in said:
        if each["kind"] == "Service":
            each["metadata"]["annotations"] = {ON_REMOVAL_ANNOTATION: value} if value else {}
    return said


def one_each(stack: ExitStack, connect: Connect, *names: str) -> dict[str, Socket]:
    """Connections to these endpoints, one to each; others are closed."""
    found: dict[str, Socket] = {}
    while len(found) < len(names):
        client, name = connect()
        if name in names and name not in found:
            found[name] = stack.enter_context(client)
        else:
            client.close()
    return found


def is_reset(client: Socket) -> bool:
    """Whether a client that only waits is told so, before its call times out."""
    try:
        client.recv(1)
    except (ConnectionAbortedError, ConnectionResetError):
        return True
    except TimeoutError:
        return False
    return False
