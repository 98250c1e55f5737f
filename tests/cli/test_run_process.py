# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run` as a process on a node of the lab: what it asks of the kernel, and how it ends."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.errors import NodeError
from ebpflb.lab.hosts import Host, Lab
from tests.network.ground import PREFIX, Ground


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    """A lab without hosts."""
    with Lab(PREFIX) as lab:
        made = Ground(lab, tmp_path)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def node(ground: Ground) -> Host:
    return ground.lab.node("node", 1)


def test_open_files(ground: Ground, node: Host) -> None:
    """Where it may have many open files it does not stay at the 1024 that it is started with."""
    agent = ground.employ(node)
    agent.under = ["prlimit", "--nofile=1024:4096"]
    ground.start()
    assert agent.process
    assert resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE) == (4096, 4096)


@pytest.mark.parametrize("port", [10256, 10249])
def test_bind_address_hard_fail(ground: Ground, node: Host, port: int) -> None:
    """A port in use ends it with status 1 and one line, and nothing of it is left."""
    ground.begin(node, "serve", "another", str(port))
    agent = ground.employ(node, "--bind-address-hard-fail")
    with pytest.raises(NodeError):
        ground.start()
    assert agent.process and agent.process.wait(30) == 1
    (line,) = [line for line in agent.log().splitlines() if line.startswith("ebpflb: ")]
    assert f":{port}" in line and "Address already in use" in line
    assert agent.log().splitlines()[-1] == line
    assert "Traceback" not in agent.log()
    assert not agent.paths.state.exists()
