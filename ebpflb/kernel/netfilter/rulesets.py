# SPDX-License-Identifier: Apache-2.0
"""All rules of netfilter in this thread's network namespace, as nft and iptables print them.

Rules that take minutes to read, or are very large, are not compared.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ebpflb import child
from ebpflb.errors import NodeError, in_words
from ebpflb.kernel.netfilter import flowtable, iptables, nft, watch
from ebpflb.kernel.netfilter.iptables import FAMILY_OF_TOOL, LEGACY, NFT_FAMILY, Tool, tools
from ebpflb.kernel.netfilter.rules import TABLE
from ebpflb.kernel.netfilter.table import KEEPER
from ebpflb.model.kube_proxy import NFT_TABLE

OWN_TABLES = {TABLE, KEEPER, flowtable.TABLE, watch.HOLD, watch.FORMER}
MOST_RULES = 128 << 20  # characters
_OF_IPTABLES = frozenset(("raw", "mangle", "nat", "filter", "security"))


def is_known(family: str, table: str) -> bool:
    """Whether a table of nftables is ebpflb's own or kube-proxy's."""
    return table == NFT_TABLE or nft.Name(family, table) in OWN_TABLES


class Printed(NamedTuple):
    """The output of one tool: nft's JSON, or iptables-save's text under the tool's name."""

    tool: str
    text: str


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


def _run(command: list[str]) -> str:
    """Return the output. Raises NodeError if the command fails or prints too much, or OSError."""
    done = child.run(command)
    if done.returncode:
        raise NodeError(" ".join(done.stderr.split()) or f"exit status {done.returncode}")
    if len(done.stdout) > MOST_RULES:
        raise NodeError(f"more than {MOST_RULES >> 20} MB of rules: not compared")
    return done.stdout
