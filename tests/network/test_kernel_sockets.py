# SPDX-License-Identifier: Apache-2.0
"""Sockets of the kernel itself (NFS, iSCSI, 9p) reach services by the socket hooks.

They are created in the cgroup of the process that mounts, or in the root cgroup if a kernel thread
creates them, and connect() calls the hooks for them as for any other socket.
"""

import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from tests.kit.sockets import Socket
from tests.kit.two_nodes import TwoNodes

ROOT = "/sys/fs/cgroup"
PORT, TARGET = 564, 5640
ADDRESS = "10.96.0.99"
MOUNT_ENDS = 60  # seconds
NULL = 0  # the procedure of a call that only asks whether the server is there
REPLY = struct.pack(">5I", 1, 0, 0, 0, 0)  # accepted, without authentication, successful


def can_mount(name: str) -> bool:
    """Whether this kernel has the file system: a mount that fails loads the module."""
    words = ["unshare", "-m", "mount", "-i", "-t", name, "none", "/mnt"]
    subprocess.run(words, check=False, capture_output=True)
    return f"\t{name}\n" in Path("/proc/filesystems").read_text()


def publish(two: TwoNodes, pod: Host) -> None:
    """Publish a service whose only endpoint is this pod."""
    ports = [{"name": "files", "port": PORT, "protocol": "TCP"}]
    target = [{"name": "files", "port": TARGET, "protocol": "TCP"}]
    two.publish(
        manifests.service("files", [ADDRESS], ports),
        manifests.endpoint_slice("files", "IPv4", two.endpoints(pod), target),
    )


@contextmanager
def listening(two: TwoNodes, pod: Host) -> Iterator[Socket]:
    with two.sockets(pod).open(AF_INET, SOCK_STREAM) as server:
        server.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", TARGET))
        server.listen()
        yield server


@contextmanager
def mounting(host: Host, kind: str, what: str, options: str) -> Iterator["subprocess.Popen[str]"]:
    """Run mount(8) on this host; nothing is left of it."""
    command = ["unshare", "-m", "mount", "-i", "-t", kind, "-o", options, what, "/mnt"]
    process = host.start(command, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not can_mount("9p"), reason="this kernel has no 9p")
@pytest.mark.parametrize("client", ["near", "hooked"], ids=["node", "pod"])
def test_a_mount_reaches_an_endpoint(two: TwoNodes, client: str) -> None:
    """The kernel's connection to a cluster IP reaches the endpoint, a pod's from its address."""
    publish(two, two.here)
    host = getattr(two, client)
    with (
        listening(two, two.here) as server,
        mounting(host, "9p", ADDRESS, f"trans=tcp,port={PORT}") as mount,
    ):
        connection, peer = server.accept()
        assert client == "near" or peer[0] == host.v4
        connection.close()  # the server knows no 9p: the mount fails
        assert mount.wait(MOUNT_ENDS) != 0


@pytest.fixture
def at_the_root(two: TwoNodes) -> Iterator[TwoNodes]:
    """Attach the near node's hooks to the root cgroup, as on a real node."""
    usual = two.agents[0].options
    attach_anew(two, *usual, f"--cgroup-root={ROOT}")
    yield two
    attach_anew(two, *usual)


def attach_anew(two: TwoNodes, *options: str) -> None:
    two.agents[0].stop()
    two.close_maps()
    assert two.ebpflb("cleanup").returncode == 0
    two.restart(*options)


@pytest.mark.skipif("LAB_KERNEL" not in os.environ, reason="all of this machine would be hooked")
@pytest.mark.skipif(not can_mount("nfs"), reason="this kernel has no NFS")
def test_a_connection_anew_reaches_the_endpoint_of_then(at_the_root: TwoNodes) -> None:
    """When its connection ends, NFS connects to the cluster IP again from a kernel thread, and
    reaches the current endpoint.
    """
    two = at_the_root
    publish(two, two.here)
    options = f"vers=3,nolock,proto=tcp,mountproto=tcp,addr={ADDRESS},mountaddr={ADDRESS}"
    options += f",port={PORT},mountport={PORT}"
    with (
        listening(two, two.here) as first,
        listening(two, two.there) as second,
        mounting(two.near, "nfs", f"{ADDRESS}:/", options),
    ):
        connection, _ = first.accept()
        with connection:
            while is_answered(connection):
                pass
            publish(two, two.there)
        connection, _ = second.accept()
        connection.close()


def is_answered(connection: Socket) -> bool:
    """Whether the next call (RFC 5531), which only tests for a server, is answered."""
    call = connection.recv(1 << 16)
    _, number, _, _, _, _, procedure = struct.unpack_from(">7I", call)
    if procedure != NULL:
        return False
    answer = struct.pack(">I", number) + REPLY
    connection.send(struct.pack(">I", 1 << 31 | len(answer)) + answer)  # the last fragment
    return True
