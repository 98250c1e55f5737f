# SPDX-License-Identifier: Apache-2.0
"""Which function of bpf/ calls which, from the text: there are no pointers to functions in it."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT

SOURCES = ROOT / "bpf"
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# A definition begins at the margin and ends with the first brace there.
DEFINITION = re.compile(r"^(?:static|int)\b[^;{}]*?\b(\w+)\([^;{}]*\)\n\{\n.*?^\}", re.M | re.S)
CALL = re.compile(r"\b(\w+)\(")


@dataclass(frozen=True)
class Function:
    """One definition; where #ifdef chooses between two, both are there."""

    name: str
    file: Path
    text: str


@cache
def functions() -> tuple[Function, ...]:
    """Every function that bpf/ defines, but for those of the stubs of kernel headers."""
    files = [it for it in sorted(SOURCES.rglob("*.[ch]")) if "stub" not in it.parts]
    return tuple(
        Function(match[1], file, match[0])
        for file in files
        for match in DEFINITION.finditer(COMMENT.sub("", file.read_text()))
    )


@cache
def calls() -> dict[str, frozenset[str]]:
    """The functions that each one calls, whichever of its definitions is compiled."""
    names = {it.name for it in functions()}
    found: dict[str, set[str]] = {name: set() for name in names}
    for function in functions():
        body = function.text.partition("\n{\n")[2]
        found[function.name] |= names & set(CALL.findall(body))
    return {name: frozenset(callees) for name, callees in found.items()}


def ways(caller: str, callee: str) -> list[tuple[str, ...]]:
    """Every chain of calls that leads from one function to another, both included."""
    if caller == callee:
        return [(callee,)]
    return [(caller, *way) for it in sorted(calls()[caller]) for way in ways(it, callee)]
