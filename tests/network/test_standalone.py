# SPDX-License-Identifier: Apache-2.0
"""The example of docs/getting-started.md, as it stands there; and manifests that change."""

import re
import subprocess
import sys
from collections.abc import Iterator
from errno import ECONNREFUSED
from functools import partial
from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from tests.docs.pages import ROOT
from tests.kit import forked, requests
from tests.kit.cluster import PORT, VIP, endpoint, running, web
from tests.kit.lab_cluster import LabCluster, started
from tests.load import scaled

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
    """Each `curl` of the page gets an answer where the page says so, and its command shows all."""
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


def test_nothing_is_missing(machine: Machine) -> None:
    """The page's objects suffice: `status` is OK."""
    done = forked.run("status", *machine.agent.where, netns=machine.node.netns)
    assert done.stdout.splitlines()[1].startswith("OK"), done.stdout


CONNECT = f"""
import select, socket, sys
failed, connections = [], 0
while not select.select([sys.stdin], [], [], 0)[0]:
    with socket.socket() as client:
        if error := client.connect_ex(({VIP!r}, {PORT})):
            failed.append(error)
        connections += 1
print(connections, *failed)
"""


def test_a_port_that_is_renamed_refuses_no_connection(tmp_path: Path) -> None:
    """A manifest is written again and again, with another name of the port in Service and slice."""
    with running(tmp_path) as cluster:
        cluster.publish(web(*map(endpoint, cluster.web)))
        command, pipe = [sys.executable, "-IS", "-c", CONNECT], subprocess.PIPE
        client = cluster.lab.keep(cluster.client.start(command, stdin=pipe, stdout=pipe))
        for number in range(scaled(100)):
            found = web(*map(endpoint, cluster.web))
            for each in (found[0]["spec"], *found[1:]):
                each["ports"][0]["name"] = f"port-{number}"
            cluster.publish(found)
        said, _ = client.communicate("", timeout=30)
        connections, *errors = map(int, said.split())
        assert connections > 100 and ECONNREFUSED not in errors, said
