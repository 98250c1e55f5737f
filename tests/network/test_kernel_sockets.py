# SPDX-License-Identifier: Apache-2.0
"""Sockets of the kernel itself, as NFS, iSCSI and 9p have them, reach services by the socket hooks.

They are created in the cgroup of the process that mounts, or in the root cgroup where a thread of
the kernel creates them, and connect() calls the hooks for them as for any others.
"""

import subprocess
from contextlib import suppress
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET

import pytest

from ebpflb.lab import manifests
from tests.kit.two_nodes import TwoNodes

PORT, TARGET = 564, 5640
ADDRESS = "10.96.0.99"


def is_available() -> bool:
    """Whether this kernel can mount by 9p."""
    with suppress(FileNotFoundError):
        subprocess.run(["modprobe", "9p"], check=False, capture_output=True)
    return "\t9p\n" in Path("/proc/filesystems").read_text()


@pytest.mark.skipif(not is_available(), reason="this kernel has no 9p")
@pytest.mark.parametrize("client", ["near", "hooked"], ids=["node", "pod"])
def test_a_mount_reaches_an_endpoint(two: TwoNodes, client: str) -> None:
    """The kernel's connection to a cluster IP arrives at the endpoint, a pod's from its address."""
    ports = [{"name": "9p", "port": PORT, "protocol": "TCP"}]
    target = [{"name": "9p", "port": TARGET, "protocol": "TCP"}]
    endpoints = two.endpoints(two.here)
    two.publish(
        manifests.service("files", [ADDRESS], ports),
        manifests.endpoint_slice("files", "IPv4", endpoints, target),
    )
    server = two.sockets(two.here).open(AF_INET, SOCK_STREAM)
    server.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", TARGET))
    server.listen()
    host = getattr(two, client)
    options = f"trans=tcp,port={PORT}"
    mount = ["unshare", "-m", "mount", "-t", "9p", "-o", options, ADDRESS, "/mnt"]
    mounting = host.start(mount, stderr=subprocess.DEVNULL)
    try:
        connection, peer = server.accept()
        assert client == "near" or peer[0] == host.v4
        connection.close()  # the server knows no 9p: the mount fails
        assert mounting.wait(30) != 0
    finally:
        mounting.kill()
        mounting.wait()
        server.close()
