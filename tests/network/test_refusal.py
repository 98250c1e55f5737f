# SPDX-License-Identifier: Apache-2.0
"""No endpoint: refused at once; none that the policy allows: dropped, without an answer.

Everything holds for both forms of the programs: for kernels where a hook names its errno (5.18),
and for those before, where the socket is sent to a place that refuses.
"""

from collections.abc import Iterator

import pytest

from ebpflb.kernel import datapath
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs import compiler, loader
from ebpflb.options import Paths
from tests.kit import requests
from tests.kit.cluster import NODEPORT, PORT, VIP, VIP6, Cluster, endpoint, web
from tests.kit.sockets import Sockets

ADDRESSES = [VIP, VIP6, f"::ffff:{VIP}"]
A_MOMENT = 0.1  # seconds in which nothing may happen


@pytest.fixture(scope="module")
def reporting(cluster: Cluster) -> Iterator[Cluster]:
    """Its audit leaves other programs than the agent's in force."""
    former = cluster.agent.options
    cluster.restart(*former, "--audit=report")
    yield cluster
    cluster.restart(*former)


@pytest.fixture(scope="module", params=["named errno", "refusing place"])
def form(reporting: Cluster, request: pytest.FixtureRequest) -> str:
    """Puts this form of the programs in force, on the agent's maps."""
    cluster = reporting
    flags = datapath.socket_flags() if request.param == "named errno" else ()
    if request.param == "named errno" and not flags:
        pytest.skip("this kernel has no bpf_set_retval")
    compiled = compiler.compile_source(datapath.SOCKET_SOURCE, flags, cache=Paths.cache)
    loaded = loader.load(compiled, cluster.maps)
    cgroup_links.attach(StateDir(cluster.agent.paths.state), cluster.node.cgroup, loaded)
    loader.close(loaded)
    return str(request.param)


@pytest.fixture
def nobody(cluster: Cluster, form: str) -> None:
    cluster.publish(web(nodeport=NODEPORT))


@pytest.fixture
def elsewhere(cluster: Cluster, form: str) -> None:
    """Endpoints on another node, under the policy Local."""
    v4, v6 = endpoint(cluster.web[0], node="other"), endpoint(cluster.web[0], node="other", v6=True)
    cluster.publish(web(v4, v6=[v6], internalTrafficPolicy="Local"))


@pytest.mark.parametrize("address", ADDRESSES)
def test_tcp(nobody: None, sockets: Sockets, address: str) -> None:
    """connect() fails with ECONNREFUSED."""
    with pytest.raises(ConnectionRefusedError):
        requests.tcp(sockets, address)


@pytest.mark.parametrize("address", ADDRESSES)
def test_connected_udp(nobody: None, sockets: Sockets, address: str) -> None:
    """connect() succeeds, as with kube-proxy; the error comes with what is sent."""
    assert is_refused_when_used(sockets, address)


def is_refused_when_used(sockets: Sockets, address: str, port: int = PORT) -> bool:
    """Whether a datagram socket is connected to this address, and refused when it sends."""
    with requests.udp_socket(sockets, address) as client:
        client.connect((address, port))
        assert client.getpeername()[:2] == (address, port)
        with pytest.raises(ConnectionRefusedError):
            client.send(b"?")
            client.recv(64)
        return True


def test_udp_connect_to_an_unserved_port(nobody: None, sockets: Sockets, cluster: Cluster) -> None:
    """So it is for an unknown port of a cluster IP, and for a NodePort without endpoints."""
    for address, port in [(VIP, 9999), (VIP6, 9999), (cluster.node.v4, NODEPORT)]:
        assert is_refused_when_used(sockets, address, port)


@pytest.mark.parametrize("address", ADDRESSES)
def test_unconnected_udp(nobody: None, sockets: Sockets, form: str, address: str) -> None:
    """sendto() fails where the hook can set the errno; else the datagram is lost. Never EPERM."""
    with requests.udp_socket(sockets, address) as client:
        client.settimeout(A_MOMENT)
        expected = ConnectionRefusedError if form == "named errno" else TimeoutError
        with pytest.raises(expected):
            requests.exchange(client, address)


@pytest.mark.parametrize("way", ["tcp", "udp"])
@pytest.mark.parametrize("address", ADDRESSES)
def test_no_local_endpoint(elsewhere: None, sockets: Sockets, address: str, way: str) -> None:
    """With endpoints elsewhere alone nothing is answered, and nothing is refused."""
    send = requests.KINDS[way]
    with requests.socket_of(send, sockets, address) as client:
        client.settimeout(A_MOMENT)
        with pytest.raises(TimeoutError):
            if way == "tcp":
                client.connect((address, PORT))
            else:
                requests.exchange(client, address)
