# SPDX-License-Identifier: Apache-2.0
"""Which Services are served here; the others are left to the kube-proxy that runs beside.

Selectors are written as kubectl's -l takes them: requirements separated by commas, which all hold.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from ebpflb.model.objects import Metadata

_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_KEY = rf"(?:{_NAME}/)?{_NAME}"
_VALUE = rf"(?:{_NAME})?"
_REQUIREMENT = re.compile(
    rf"(?P<absent>!)?\s*(?P<key>{_KEY})\s*"
    rf"(?:(?P<operator>==?|!=)\s*(?P<value>{_VALUE})"
    rf"|(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?"
)
_COMMA_OUTSIDE_OF_SETS = re.compile(r",(?![^()]*\))")
_DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_EXAMPLE = "app=web,tier!=db,stage in (test,canary),!legacy"


class Requirement(NamedTuple):
    """A label and what it may be. ``values`` is None where only its presence matters.

    As in the API, a label that is absent is none of the values, so ``negated`` holds for it.
    """

    text: str
    key: str
    values: frozenset[str] | None
    negated: bool

    def holds(self, labels: dict[str, str]) -> bool:
        value = labels.get(self.key)
        found = value is not None if self.values is None else value in self.values
        return found != self.negated


@dataclass(frozen=True)
class ServedServices:
    """Those in one of ``namespaces`` (none: in any) whose labels meet all of ``selector``."""

    namespaces: frozenset[str] = frozenset()
    selector: tuple[Requirement, ...] = ()

    @property
    def is_all(self) -> bool:
        return not (self.namespaces or self.selector)

    def has(self, metadata: Metadata) -> bool:
        if self.namespaces and metadata.namespace not in self.namespaces:
            return False
        labels = metadata.labels or {}
        return all(requirement.holds(labels) for requirement in self.selector)

    def __str__(self) -> str:
        """As the options --namespaces and --services take them."""
        namespaces = show_namespaces(self.namespaces)
        parts = [f"--namespaces={namespaces}"] if namespaces else []
        return " ".join(parts + [f"--services={show(self.selector)}"] * bool(self.selector))


ALL_SERVICES = ServedServices()


def parse_namespaces(text: str) -> frozenset[str]:
    """Names separated by commas; "": all. Raises ValueError."""
    names = _parts(text.split(","))
    for name in names:
        if not _DNS_LABEL.fullmatch(name):
            raise ValueError(f'"{name}" is not the name of a namespace')
    return frozenset(names)


def show_namespaces(namespaces: frozenset[str]) -> str:
    """As ``parse_namespaces`` takes it."""
    return ",".join(sorted(namespaces))


def parse(text: str) -> tuple[Requirement, ...]:
    """A label selector; "": none. Raises ValueError."""
    return tuple(_requirement(part) for part in _parts(_COMMA_OUTSIDE_OF_SETS.split(text)))


def show(selector: tuple[Requirement, ...]) -> str:
    """As ``parse`` takes it."""
    return ",".join(requirement.text for requirement in selector)


def meets(selector: tuple[Requirement, ...], labels: str) -> bool:
    """``labels`` are as ``show_labels`` writes them."""
    found = dict(pair.split("=", 1) for pair in labels.split(",") if pair)
    return all(requirement.holds(found) for requirement in selector)


def show_labels(labels: dict[str, str]) -> str:
    """As kubectl shows them: neither names nor values have commas, nor names an equals sign."""
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _parts(parts: list[str]) -> list[str]:
    if len(parts) == 1 and not parts[0].strip():
        return []
    return [part.strip() for part in parts]


def _requirement(text: str) -> Requirement:
    found = _REQUIREMENT.fullmatch(text)
    compared = found and (found["operator"] or found["set"])
    if not found or (found["absent"] and compared):
        raise ValueError(f'"{text}" is no requirement of a label selector such as {_EXAMPLE}')
    if not compared:
        return Requirement(text, found["key"], None, bool(found["absent"]))
    listed = [found["value"]] if found["operator"] else found["values"].split(",")
    values = frozenset(value.strip() for value in listed)
    if not all(re.fullmatch(_VALUE, value) for value in values):
        raise ValueError(f'"{text}" has a value that no label can have')
    return Requirement(text, found["key"], values, compared in ("!=", "notin"))
