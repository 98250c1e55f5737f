# SPDX-License-Identifier: Apache-2.0
"""The table of the engine netfilter while other programs change or flush it.

The clients are outside: their packets are translated, not their sockets.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from socket import SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.table import TABLE
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import needs
from tests.kit.cluster import ServingOutside, serving_outside
from tests.kit.sockets import Socket


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingOutside]:
    needs.netfilter()
    with serving_outside(tmp_path_factory.mktemp("tracked"), Engine.NETFILTER) as made:
        yield made


@pytest.fixture
def node(tracked: ServingOutside) -> Iterator[ServingOutside]:
    """Move the test's thread into the node's namespace."""
    with nodes.entered(tracked.node.netns):
        tracked.serve(*tracked.web)
        yield tracked


def goes_on(client: Socket) -> bool:
    client.send(b"still here")
    return b"still here" in client.recv(64)


def test_a_flush_of_all_rules_harms_nothing(node: ServingOutside) -> None:
    """After `nft flush ruleset` beside an agent, open connections and UDP flows continue, and new
    connections are served.
    """
    needs.owned_tables()
    clients = [node.connection(kind) for kind in (SOCK_STREAM, SOCK_DGRAM)]
    node.node.nft("flush ruleset")
    assert all(map(goes_on, clients))
    wait_until("new connections are served", lambda: is_served(node))
    assert all(map(goes_on, clients))


def test_a_table_that_goes_while_no_agent_runs_is_named(node: ServingOutside) -> None:
    """`status` names the missing table: connections end, and only an agent restores the table."""
    client = node.connection()
    node.agent.stop()
    assert goes_on(client)
    node.node.nft("flush ruleset")
    found = json.loads(node.ebpflb("status", "-o", "json").stdout)
    assert {"verdict": "DEGRADED", "cause": "no nft table"}.items() <= found["reasons"][0].items()
    assert "table inet ebpflb was removed" in node.ebpflb("status").stdout
    assert not is_served(node)
    node.agent.start()
    wait_until("new connections are served", lambda: is_served(node))
    found = json.loads(node.ebpflb("status", "-o", "json").stdout)
    assert "no nft table" not in {each["cause"] for each in found["reasons"]}


FIREWALLS = Path(__file__).parents[2] / "docs/firewalls.md"


def test_saved_rules(node: ServingOutside, tmp_path: Path) -> None:
    """A saved file with the rules of all tables cannot be loaded; the command in docs/firewalls.md
    saves only the operator's own rules, which can be loaded.
    """
    needs.owned_tables()
    node.node.nft("table inet own { chain c { type filter hook input priority 0; }; }")
    (tmp_path / "all").write_text("flush ruleset\n" + nodes.run("nft", "list", "ruleset"))
    (command,) = (
        it for it in FIREWALLS.read_text().splitlines() if it.startswith("nft list tables")
    )
    own = nodes.run("sh", "-c", command.replace("> FILE", ""))
    (tmp_path / "own").write_text(f"flush ruleset\n{own}")
    with pytest.raises(AssertionError, match="Operation not permitted"):
        nodes.run("nft", "-f", f"{tmp_path}/all")
    nodes.run("nft", "delete", "table", "inet", "own")
    nodes.run("nft", "-f", f"{tmp_path}/own")
    assert nft.exists(nft.Name("inet", "own")) and is_served(node)
    nodes.run("nft", "delete", "table", "inet", "own")


def is_served(node: ServingOutside) -> bool:
    """Whether new connections work. If the agent does not own the table, they fail until it is
    restored.
    """
    try:
        return goes_on(node.connection())
    except ConnectionRefusedError:
        return False


def test_others_cannot_change_the_table(node: ServingOutside) -> None:
    """Other programs cannot change the table while an agent runs; before Linux 6.9 the agent
    restores what they remove.
    """
    words = [*node.node.enter, "nft", "delete", "table", "inet", "ebpflb"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        assert "Operation not permitted" in done.stderr
        return
    said = "put back what another program had removed"
    wait_until("the log says so", lambda: said in node.agent.log())
    wait_until("the table is there again", lambda: nft.exists(TABLE))
