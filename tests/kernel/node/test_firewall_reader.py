# SPDX-License-Identifier: Apache-2.0
"""The rules of a network namespace as its tools print them, and messages if a tool is missing."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ebpflb import child
from ebpflb.kernel.netfilter.firewall import tables
from ebpflb.kernel.netfilter.table import Keeper
from ebpflb.lab.netns import Namespace
from tests.kernel.node import nodes

NAME = f"ebpflb-test-{os.getpid()}-rules"
TABLE = "table inet fw {\nchain c {\n}\n}\n"
HERE = Namespace(NAME)
Fake = Callable[[str], None]


@pytest.fixture
def namespace() -> Iterator[None]:
    with nodes.fresh(NAME):
        yield


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Leave one tool on this machine: an nft that runs this line of shell."""

    def install(line: str) -> None:
        tool = tmp_path / "nft"
        tool.write_text(f"#!/bin/sh\n{line}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def titles() -> tuple[list[str], list[str]]:
    """Return the titles of the tables here, and the messages about unreadable ones."""
    unread = list[str]()
    return [table.title for table in tables(unread)], unread


@pytest.mark.usefixtures("namespace")
def test_tables_of_every_family_are_read() -> None:
    """Tables of every family are read; without tables there is no result."""
    assert titles() == ([], [])
    HERE.nft(TABLE + TABLE.replace("inet", "netdev"))
    assert titles() == (["table inet fw", "table netdev fw"], [])


@pytest.mark.usefixtures("namespace")
def test_tables_with_one_flag() -> None:
    """Neither a dormant table nor one that only the agent may change keeps others from being read;
    a dormant one does not count.
    """
    with closing(Keeper()) as keeper:
        keeper.open()
        HERE.nft(TABLE + TABLE.replace("fw", "idle").replace("chain", "flags dormant; chain"))
        assert titles() == (["table inet fw"], [])


@pytest.mark.usefixtures("namespace")
def test_a_table_that_cannot_be_read(only: Fake) -> None:
    """It is named, and others are read."""
    HERE.nft(TABLE + TABLE.replace("fw", "odd"))
    table = '{"nftables": [{"table": {"family": "inet", "name": "fw"}}]}'
    only(f"[ $5 = fw ] && echo '{table}' || echo '{{'")
    assert titles() == (["table inet fw"], ["table inet odd: nft's output cannot be read"])


@pytest.mark.usefixtures("namespace")
@pytest.mark.parametrize("tool", nodes.TOOLS, ids=lambda tool: tool.name)
def test_each_variant_is_read_by_its_own_tool(tool: nodes.Tool) -> None:
    """Each variant that has tables is read by its own tool, and by no other."""
    tool.restore("*raw\n-A PREROUTING -p udp -j DROP\nCOMMIT\n")
    unread = list[str]()
    (table,) = tables(unread)
    assert (table.title, unread) == (f"{tool.name}, table raw", [])
    assert [rule.text for rule in table.chains["PREROUTING"].rules] == ["-p udp -j DROP"]


@pytest.mark.usefixtures("namespace")
def test_no_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing tool is named only if other programs have tables."""
    HERE.nft("table inet ebpflb {\n}\n")
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        assert titles() == ([], [])
    HERE.nft(TABLE)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert titles() == ([], ["nft: it has rules, and nft is not installed here"])


FAULTS = [
    ("echo 'Operation not permitted (you must be root)' >&2; exit 1", "you must be root"),
    ("echo one >&2; echo two >&2; exit 2", "one two"),
    ("exit 3", "exit status 3"),
    ("echo nothing", "output cannot be read"),
    ("while :; do :; done", "no answer in 0.5 s"),
    ("while :; do echo 0123456789abcdef >&2; done", "no answer in 0.5 s"),
]


@pytest.mark.usefixtures("namespace")
@pytest.mark.parametrize(("line", "said"), FAULTS)
def test_a_faulty_tool_gives_one_line(
    monkeypatch: pytest.MonkeyPatch, only: Fake, line: str, said: str
) -> None:
    """A tool that fails, prints something else or does not end gives one line, and is ended."""
    HERE.nft(TABLE)
    monkeypatch.setattr(child, "SECONDS", 0.5)
    only(line)
    found, (unread,) = titles()
    assert not found
    assert unread.startswith("table inet fw: nft")
    assert said in unread
    assert "\n" not in unread
