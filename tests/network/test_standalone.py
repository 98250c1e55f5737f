# SPDX-License-Identifier: Apache-2.0
"""The example of docs/getting-started.md runs as printed, and manifests may change."""

import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from tests.docs.pages import ROOT
from tests.kit import forked, requests
from tests.kit.lab_cluster import LabCluster, started

PAGE = (ROOT / "docs/getting-started.md").read_text()
# What the page tells to put in: this machine's address and name.
ADDRESS, NAME = "192.0.2.10", "node-1"


class Machine(LabCluster):
    """A machine with the page's web server and its manifest; ``outside`` is another machine."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.node, self.outside = lab.node("node", 1), lab.outside("outside", 1)
        self.agent = self.add_agent(self.node)

    def start(self) -> None:
        (manifest,) = re.findall(r"(?ms)^```yaml\n(.*?)^```$", PAGE)
        assert ADDRESS in manifest and NAME in manifest
        text = manifest.replace(ADDRESS, self.node.v4).replace(NAME, self.node.name)
        (self.agent.manifests / "web.yaml").write_text(text)
        (server,) = re.findall(r"(?m)^(python3 -m http\.server .*) &$", PAGE)
        self.lab.keep(self.node.start(server.split(), stderr=subprocess.DEVNULL))
        self.agent.start()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with started(lambda lab: Machine(lab, tmp_path_factory.mktemp("machine"))) as made:
        yield made


def answers(machine: Machine, host: Host, url: str) -> bool:
    address, _, port = url.partition(":")
    with requests.tcp_socket(machine.sockets(host), address) as client:
        try:
            client.connect((address, int(port or 80)))
        except ConnectionRefusedError:
            return False
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        return bool(client.recv(64).startswith(b"HTTP/1.0 200"))


def test_the_example_works(machine: Machine) -> None:
    """Each `curl` of the page gets an answer if the page says so, and its command lists all
    Services.
    """
    asked = re.findall(r"(?m)^curl http://(\S+)/ +# on (this|any) machine$", PAGE)
    assert len(asked) == 2
    for url, where in asked:
        url = url.replace(ADDRESS, machine.node.v4)
        hosts = [machine.node, *([machine.outside] if where == "any" else [])]
        for host in hosts:
            wait_until(f"{url} answers", partial(answers, machine, host, url))
    shown = forked.run("services", "get", "default/web", *machine.agent.where)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{machine.node.v4}:8080" in shown.stdout
