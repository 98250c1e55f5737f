# SPDX-License-Identifier: Apache-2.0
"""The description of each word of `-o json` in docs/output.md."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs/output.md"
SCALARS: dict[str, Any] = {"string": str, "number": (int, float), "boolean": bool}


class Word(NamedTuple):
    types: frozenset[str]
    commands: frozenset[str]


def words() -> dict[str, Word]:
    """Return the words listed for several commands, and the words below each command, by word or
    type.
    """
    text = PAGE.read_text()
    found = [
        *re.findall(r"(?m)^- `(\w+)` \(([\w ]+); ([\w ]+)\)", text),
        *(
            (name, types, command)
            for command, below in chapters(text)
            for name, types in rows(below)
        ),
    ]
    return {
        name: Word(frozenset(types.split(" or ")), frozenset(commands.split()))
        for name, types, commands in found
    }


def chapters(text: str) -> Iterator[tuple[str, str]]:
    parts = re.split(r"(?m)^### (\w+)\n", text)
    return zip(parts[1::2], parts[2::2], strict=True)


def rows(below: str) -> Iterator[tuple[str, str]]:
    yield from re.findall(r"(?m)^- `(\w+)` \(([\w ]+)\)", below)
    for types, names in re.findall(r"(?m)^- \*([\w ]+)\*: (.*)$", below):
        outside = re.sub(r"\([^)]*\)", "", names)
        yield from ((name, types) for name in re.findall(r"`(\w+)`", outside))


WORDS = words()


def is_of(kind: str, value: Any) -> bool:
    """Whether a value has this type, as the page names it."""
    if kind.startswith("list of "):
        return isinstance(value, list) and all(is_of(kind[8:], each) for each in value)
    if kind in SCALARS:
        of_number = kind != "number" or not isinstance(value, bool)
        return isinstance(value, SCALARS[kind]) and of_number
    if kind == "null":
        return value is None
    return isinstance(value, dict) and kind in ("object", "map")


def faults(value: Any, command: str) -> Iterator[str]:
    """Yield the parts of a value that the page does not describe."""
    for each in value if isinstance(value, list) else ():
        yield from faults(each, command)
    if not isinstance(value, dict):
        return
    for name, each in value.items():
        word = WORDS.get(name)
        if word is None or command not in word.commands:
            yield f"{command}: {name} is not described"
        elif not any(is_of(kind, each) for kind in word.types):
            yield f"{command}: {name}: {each} is none of {word.types}"
        elif "map" in word.types and isinstance(each, dict):
            yield from faults([it for it in each.values() if isinstance(it, dict)], command)
        else:
            yield from faults(each, command)
