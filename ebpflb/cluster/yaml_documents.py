# SPDX-License-Identifier: Apache-2.0
"""YAML of unknown origin -> plain values, within limits.

libyaml's events cost a twentieth of the values that are made of them, so a file is first read as
events: they show how deep it is nested, and how large what its aliases and merge keys refer to
would be. Without that a file of a kilobyte could need all memory, or end the process.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

MAX_DEPTH = 1000  # levels of nesting; real manifests have about ten
MAX_NODES = 500_000  # values of one document, aliases expanded; each takes 400 bytes for a moment


def load_all(data: bytes) -> Iterator[Any]:
    """The documents, one at a time: all at once would take 200 MB for 10,000 services.

    Raises ValueError, with a message for the operator, for whatever is not within the limits or
    cannot be parsed.
    """
    try:
        check(data)
        yield from yaml.load_all(data, Loader=Loader)
    except Exception as error:  # PyYAML's constructors raise any, such as KeyError for !!bool x
        raise ValueError(describe(error)) from error


def describe(error: Exception) -> str:
    """In words, also if it says nothing but a value."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    known = isinstance(error, yaml.YAMLError | ValueError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def check(data: bytes) -> None:
    """Raises ValueError for deep nesting, which would be a segmentation fault in libyaml, and for
    too many values. What is no YAML raises YAMLError.
    """
    document = _Document()
    for event in yaml.parse(data, Loader=Loader):
        if isinstance(event, yaml.DocumentStartEvent):
            document = _Document()
        elif isinstance(event, yaml.CollectionStartEvent):
            document.begin(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            document.end()
        elif isinstance(event, yaml.ScalarEvent):
            document.add(1)
            document.name(event.anchor, 1)
        elif isinstance(event, yaml.AliasEvent):
            document.add(document.size_of(event.anchor))


class _Document:
    """Counts the values of one document, with those that aliases stand for."""

    def __init__(self) -> None:
        self._open: list[tuple[str | None, int]] = []  # collections: anchor, values before it
        self._sizes: dict[str, int] = {}  # by anchor; of a collection that is open, 0
        self._count = 0

    def begin(self, anchor: str | None) -> None:
        self.name(anchor, 0)
        self._open.append((anchor, self._count))
        self.add(1)
        if len(self._open) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")

    def end(self) -> None:
        anchor, before = self._open.pop()
        self.name(anchor, self._count - before)

    def add(self, values: int) -> None:
        self._count += values
        if self._count > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} values in a document, aliases expanded")

    def name(self, anchor: str | None, size: int) -> None:
        if anchor is not None:
            self._sizes[anchor] = size

    def size_of(self, anchor: str | None) -> int:
        """An alias of nothing is left to the parser."""
        size = self._sizes.get(anchor or "", 1)
        if not size:
            raise ValueError(f"the alias {anchor} is within what it refers to")
        return size


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Without dates and base 60: creationTimestamp stays text, and so does 2001:2:3:4:5:6:7:8."""


Loader.yaml_implicit_resolvers = {
    first: [pair for pair in resolvers if pair[0].rpartition(":")[2] not in ("timestamp", "int")]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(?:0x[0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)$"),
    list("-+0123456789"),
)
