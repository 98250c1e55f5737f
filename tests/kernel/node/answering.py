# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for a kube-proxy: a process with its name, or a server at its port."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from shutil import copy
from socket import AF_INET, AF_INET6

from ebpflb.model.kube_proxy import PROXY_MODE_PORT
from tests.kit import http_server


@contextmanager
def process(folder: Path) -> Iterator[int]:
    """Yield the pid of a process called kube-proxy, in the caller's network namespace."""
    program = folder / "kube-proxy"
    copy("/bin/sleep", program)
    with subprocess.Popen([str(program), "600"]) as started:
        try:
            yield started.pid
        finally:
            started.kill()


@contextmanager
def answer(text: str, address: str = "127.0.0.1") -> Iterator[None]:
    """Serve this answer at /proxyMode, in the caller's network namespace."""

    class Handler(http_server.Handler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/proxyMode" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

    class Server(http_server.Server):
        address_family = AF_INET6 if ip_address(address).version == 6 else AF_INET

    with Server((address, PROXY_MODE_PORT), Handler):
        yield
