# SPDX-License-Identifier: Apache-2.0
"""iptables in this network namespace: both families, in the legacy and the nf_tables variant.

Only its own tools understand what it keeps. Which of them is which is asked of them, for a
machine may have only `iptables`, or that beside `iptables-legacy` and `iptables-nft`.
"""

import shutil
import subprocess
from collections.abc import Iterator
from socket import AF_INET, AF_INET6
from typing import NamedTuple

from ebpflb.errors import NodeError
from ebpflb.model.iptables_rules import Table, parse

LEGACY, _NFT = "legacy", "nft"
_PATIENCE = "10"  # seconds for the lock that all of them take
FAMILIES = {"iptables": AF_INET, "ip6tables": AF_INET6}


class Tool(NamedTuple):
    """One family in one variant; ``command`` is None where it is not installed."""

    family: str  # iptables or ip6tables
    variant: str  # legacy or nft
    command: str | None

    @property
    def name(self) -> str:
        return f"{self.family}-{self.variant}"

    def tables(self) -> list[Table]:
        """All that there is; nothing is loaded or made by looking. Raises NodeError."""
        return parse(_run([f"{self.command}-save"]))

    def restore(self, script: str) -> None:
        """Does all of it or nothing. Raises NodeError with its words."""
        _run([f"{self.command}-restore", "-w", _PATIENCE, "--noflush"], script)


def tools() -> Iterator[Tool]:
    """All four."""
    for family in FAMILIES:
        for variant in (LEGACY, _NFT):
            yield Tool(family, variant, _command(family, variant))


def _command(family: str, variant: str) -> str | None:
    named = f"{family}-{variant}"
    if shutil.which(f"{named}-save") and shutil.which(f"{named}-restore"):
        return named
    return family if shutil.which(f"{family}-save") and _variant(family) == variant else None


def _variant(command: str) -> str:
    """iptables(8) says "(nf_tables)" or "(legacy)" since 1.8, nothing before."""
    said = subprocess.run([command, "-V"], capture_output=True, text=True, check=False).stdout
    return _NFT if "(nf_tables)" in said else LEGACY


def _run(words: list[str], said: str = "") -> str:
    done = subprocess.run(words, input=said, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise NodeError(f"{words[0]}: {reason}")
    return done.stdout
