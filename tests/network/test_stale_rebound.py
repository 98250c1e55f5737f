# SPDX-License-Identifier: Apache-2.0
"""Where the kernel ends no sockets a pod's connected UDP client goes on without an error: the
packet path takes its flow to another backend (kube-proxy.md 11.1).

The agents are told EOPNOTSUPP by all that asks to end a socket, as by a kernel that was built
without CONFIG_INET_DIAG_DESTROY.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab import cni
from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host
from tests.kit import requests, two_nodes
from tests.kit.sockets import Socket
from tests.kit.two_nodes import PORT, Frontends, TwoNodes

UNABLE = """
import errno
from ebpflb.kernel.node.sock_diag import SockDiag
from ebpflb.errors import KernelError


def destroy(self, one):
    raise KernelError("sock_diag", errno.EOPNOTSUPP, "Operation not supported")


SockDiag.destroy = destroy
"""
NUMBER = 60


@pytest.fixture(scope="module", params=[cni.Bridge, cni.Routed], ids=["bridge", "routed"])
def unable(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    """Two nodes whose agents cannot end a socket."""
    folder: Path = tmp_path_factory.mktemp("unable")
    (folder / "sitecustomize.py").write_text(UNABLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LabAgent, "under", ["env", f"PYTHONPATH={folder}:{Path.cwd()}"])
        network = request.param()
        with two_nodes.running(folder, *two_nodes.CLUSTER_CIDR, network=network) as made:
            yield made


@pytest.fixture(params=[0, 1], ids=["v4", "v6"])
def vip(request: pytest.FixtureRequest) -> str:
    found: str = Frontends(NUMBER).cluster[request.param]
    return found


@pytest.fixture
def is_bridged(request: pytest.FixtureRequest) -> bool:
    return "bridge" in request.node.callspec.id


@pytest.fixture
def client(unable: TwoNodes, vip: str) -> Iterator[Socket]:
    """A pod's, connected to the endpoint on the other node."""
    serve(unable, unable.there)
    with requests.udp_socket(unable.sockets(unable.hooked), vip) as opened:
        opened.connect((vip, PORT))
        assert exchange(opened) == unable.there.name
        yield opened
    unable.delete_flows("other_flows")


def serve(two: TwoNodes, *pods: Host) -> None:
    two.publish(two.service("moving", NUMBER, *pods))


def exchange(client: Socket) -> str:
    """The backend that answers, from the address that the client is connected to."""
    client.send(b"?")
    answer = requests.receive(client)
    assert answer.peer == client.getpeername()[:2]
    return answer.name


def move(two: TwoNodes, *pods: Host, flows: int = 1) -> None:
    """Serves with these, and waits until the first node's agent has taken the flows there."""
    serve(two, *pods)
    alive = {address for pod in pods for address in (pod.v4, pod.v6)}

    def moved() -> list[str]:
        found = two.maps["other_flows"].items()
        asked = [str(flow.address) for _, flow in found if "request" in flow.flags]
        return [address for address in asked if address in alive]

    wait_until("the flows are re-bound", lambda: len(moved()) >= flows)


def test_goes_on(unable: TwoNodes, client: Socket) -> None:
    """The connected client is answered by whoever serves now, and sees the frontend all along."""
    move(unable, unable.here)
    assert [exchange(client) for _ in range(3)] == [unable.here.name] * 3


def test_neighbour(unable: TwoNodes, client: Socket, vip: str, is_bridged: bool) -> None:
    """A client of a backend on this node goes on if the node routes between them.

    On a bridge its datagrams go to the former backend's hardware: there they are left alone.
    """
    with requests.udp_socket(unable.sockets(unable.hooked), vip) as beside:
        serve(unable, unable.here)
        beside.connect((vip, PORT))
        assert exchange(beside) == unable.here.name
        move(unable, unable.twin, flows=1 if is_bridged else 2)
        assert exchange(client) == unable.twin.name
        assert exchange(beside) == (unable.here if is_bridged else unable.twin).name
