# SPDX-License-Identifier: Apache-2.0
"""iptables in this network namespace: both families, in the legacy and the nf_tables variant.

Only its own tools can read and write its rules. `iptables` alone may be either variant, so the
tool is asked; a machine may have `iptables-legacy` and `iptables-nft` too.
"""

from collections.abc import Iterator
from socket import AF_INET, AF_INET6
from typing import NamedTuple

from ebpflb import child
from ebpflb.errors import NodeError
from ebpflb.model.iptables_rules import IptablesTable, parse
from ebpflb.node import nft, xtables

LEGACY, _NFT = "legacy", "nft"
_LOCK_TIMEOUT = "10"  # seconds for the lock that all of them take
FAMILY_OF_TOOL = {"iptables": AF_INET, "ip6tables": AF_INET6}
NFT_FAMILY = {"iptables": "ip", "ip6tables": "ip6"}


class Tool(NamedTuple):
    """One family in one variant; ``command`` is None where it is not installed."""

    family: str  # iptables or ip6tables
    variant: str  # legacy or nft
    command: str | None

    @property
    def name(self) -> str:
        return f"{self.family}-{self.variant}"

    def tables(self) -> list[IptablesTable]:
        """All tables; reading them loads no module and creates no table. Raises NodeError."""
        return parse(_run([f"{self.command}-save"]))

    def table(self, name: str) -> IptablesTable | None:
        """One table; None if it is not there. Reading creates none. Raises NodeError."""
        if not self.has(name):
            return None
        if not self.command:
            raise NodeError(f"it has rules, and {self.name} is not installed here")
        return next(iter(parse(_run([f"{self.command}-save", "-t", name]))), None)

    def has(self, table: str) -> bool:
        """Whether the kernel has this table. Raises NodeError."""
        if self.variant == LEGACY:
            return table in xtables.tables(FAMILY_OF_TOOL[self.family])
        return nft.Name(NFT_FAMILY[self.family], table) in nft.tables()

    def restore(self, script: str) -> None:
        """Does all of the script or nothing. Raises NodeError with the tool's message."""
        _run([f"{self.command}-restore", "-w", _LOCK_TIMEOUT, "--noflush"], script)


def tools() -> Iterator[Tool]:
    """Both families in both variants."""
    for family in FAMILY_OF_TOOL:
        for variant in (LEGACY, _NFT):
            yield Tool(family, variant, _command(family, variant))


def _command(family: str, variant: str) -> str | None:
    named = f"{family}-{variant}"
    if child.find(f"{named}-save") and child.find(f"{named}-restore"):
        return named
    return family if child.find(f"{family}-save") and _variant(family) == variant else None


def _variant(command: str) -> str:
    """iptables(8) says "(nf_tables)" or "(legacy)" since 1.8, nothing before."""
    return _NFT if "(nf_tables)" in _run([command, "-V"]) else LEGACY


def _run(command: list[str], stdin: str = "") -> str:
    try:
        done = child.run(command, stdin)
    except OSError as error:
        raise NodeError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise NodeError(f"{command[0]}: {reason}")
    return done.stdout
