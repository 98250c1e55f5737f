# SPDX-License-Identifier: Apache-2.0
"""All rules of netfilter in this thread's network namespace, as nft and iptables print them.

Time and memory are limited: rules that take longer to read, or are larger, are not read.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, NamedTuple

from ebpflb import child
from ebpflb.errors import NodeError, in_words
from ebpflb.kernel.netfilter import flowtable, iptables, nft, watch
from ebpflb.kernel.netfilter.iptables import FAMILY_OF_TOOL, LEGACY, NFT_FAMILY, Tool, tools
from ebpflb.kernel.netfilter.rules import TABLE
from ebpflb.kernel.netfilter.table import KEEPER
from ebpflb.model.kube_proxy import NFT_TABLE

OWN_TABLES = {TABLE, KEEPER, flowtable.TABLE, watch.HOLD, watch.FORMER}
MOST_BYTES_OF_RULES = 128 << 20
MOST_SECONDS = 60.0
_OF_IPTABLES = frozenset(("raw", "mangle", "nat", "filter", "security"))


def is_known(family: str, table: str) -> bool:
    """Whether a table of nftables is ebpflb's own or kube-proxy's."""
    return table == NFT_TABLE or nft.Name(family, table) in OWN_TABLES


class Printed(NamedTuple):
    """The output of one tool: nft's JSON, or iptables-save's text under the tool's name."""

    tool: str
    text: bytes


class Ruleset(NamedTuple):
    """``unread`` has a line for each tool whose rules exist and cannot be read."""

    printed: tuple[Printed, ...]
    unread: tuple[str, ...]


def read() -> Ruleset:
    """Read all rules; loads no module and changes nothing."""
    printed, unread = [], []
    for name, command in _commands():
        try:
            if isinstance(command, NodeError):
                raise command
            printed.append(Printed(name, _run(command)))
        except (NodeError, OSError) as error:
            unread.append(f"{name}: {in_words(error)}")
    return Ruleset(tuple(printed), tuple(unread))


def _commands() -> Iterator[tuple[str, list[str] | NodeError]]:
    """Yield the command for each tool that has tables here, or why they cannot be read."""
    try:
        tables = nft.tables()
    except NodeError:
        tables = set()
    if child.find("nft"):
        yield "nft", ["nft", "-j", "list", "ruleset"]
    elif any(not is_known(*name) for name in tables):
        yield "nft", NodeError("it has rules, and nft is not installed here")
    for tool in tools():
        try:
            if _has_tables(tool, tables):
                missing = NodeError(f"it has rules, and {tool.name} is not installed here")
                yield tool.name, [f"{tool.command}-save"] if tool.command else missing
        except NodeError as error:
            yield tool.name, error


def _has_tables(tool: Tool, tables: set[nft.Name]) -> bool:
    if tool.variant == LEGACY:
        return bool(iptables.legacy_tables(FAMILY_OF_TOOL[tool.family]))
    family = NFT_FAMILY[tool.family]
    return any(name.family == family and name.table in _OF_IPTABLES for name in tables)


def _run(command: list[str]) -> bytes:
    """Return the output.

    Raises NodeError if the command fails, takes too long or prints too much.
    """
    with child.start(command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        errors = _Drain(process.stderr)
        timer = threading.Timer(MOST_SECONDS, process.kill)
        timer.start()
        try:
            output = process.stdout.read(MOST_BYTES_OF_RULES + 1)
            if len(output) > MOST_BYTES_OF_RULES:
                raise NodeError(f"more than {MOST_BYTES_OF_RULES >> 20} MB of rules: not compared")
            status = process.wait()
        finally:
            process.kill()
            timer.cancel()
            errors.join(1.0)  # not longer: child processes of the tool may hold the pipe
    if status < 0:
        raise NodeError(f"no answer in {MOST_SECONDS:g} s: not compared")
    if status:
        raise NodeError(errors.line or f"exit status {status}")
    return output


class _Drain(threading.Thread):
    """Read a tool's error output, and keep its beginning as one line."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._stream, self.line = stream, ""
        self.start()

    def run(self) -> None:
        with suppress(ValueError):  # the stream has been closed
            said = self._stream.read(1000)
            self.line = " ".join(said.decode(errors="replace").split())
            while self._stream.read(1 << 16):
                pass
