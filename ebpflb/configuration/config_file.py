# SPDX-License-Identifier: Apache-2.0
"""A configuration file -> KubeProxyConfiguration with its defaults.

kube-proxy reads strictly and, where only names are wrong, says so and reads on (kube-proxy.md 15).
So do we, and every name is told. What has the wrong type is an error; all such errors are found at
once: each is taken out, and the rest is read again. Of a list the others keep their places.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args, get_origin

import msgspec
import yaml

from ebpflb.cluster.documents import Loader, check_depth
from ebpflb.configuration import addresses, durations, fields
from ebpflb.configuration.durations import Duration, FlushFrequency
from ebpflb.configuration.fields import KubeProxyConfiguration, Section, join, value_at
from ebpflb.errors import ConfigurationError

log = logging.getLogger(__name__)

_WHERE = re.compile(r"(?P<reason>.*) - at `(?:key in )?\$(?P<path>.*)`", re.DOTALL)
_SOMEWHERE = "[...]"  # in a mapping of our making: featureGates is the only one
_STEP = re.compile(r"\.([^.\[]+)|\[([0-9]+)\]")


class Wrong(NamedTuple):
    """A field and why it cannot be meant."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class ReadConfiguration(NamedTuple):
    """What was read; fields that are ``wrong`` have their defaults."""

    configuration: KubeProxyConfiguration
    wrong: tuple[Wrong, ...]


def read(path: Path) -> ReadConfiguration:
    """Raises ConfigurationError for a file that is not there, or no configuration at all."""
    try:
        text = parse(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    _check_kind(path, text.values)
    unknown = tuple(_unknown(KubeProxyConfiguration, text.values, ""))
    for what, names in (("unknown", unknown), ("duplicate", text.duplicates)):
        if names:
            log.warning("%s: read leniently: %s fields: %s", path, what, ", ".join(names))
    return interpret(text.values)


def interpret(values: dict[str, Any]) -> ReadConfiguration:
    """Plain values -> fields."""
    wrong: list[Wrong] = []
    while True:
        try:
            converted = msgspec.convert(values, KubeProxyConfiguration, dec_hook=decode)
            break
        except msgspec.ValidationError as error:
            wrong.append(_take_out(values, str(error)))
    said = {path for path in addresses.PATHS if value_at(converted, path)}
    return ReadConfiguration(
        addresses.complete(fields.with_defaults(converted), said), tuple(wrong)
    )


def _check_kind(path: Path, values: dict[str, Any]) -> None:
    expected = {"apiVersion": fields.API_VERSION, "kind": fields.KIND}
    lines = [
        f'{path}: {field}: must be "{wanted}", not {values.get(field)!r}'
        for field, wanted in expected.items()
        if values.get(field) != wanted
    ]
    if lines:
        raise ConfigurationError("\n".join(lines))


def _unknown(kind: type[Section], values: Any, path: str) -> Iterator[str]:
    if not isinstance(values, dict):
        return
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in values.items():
        if name not in known:
            yield join(path, name)
            continue
        inner = known[name]
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _unknown(inner, value, join(path, name))
        elif get_origin(inner) is tuple and issubclass(get_args(inner)[0], Section):
            for index, each in enumerate(value if isinstance(value, list) else ()):
                yield from _unknown(get_args(inner)[0], each, join(join(path, name), index))


def decode(kind: type[Duration], value: Any) -> Duration:
    """For msgspec. Text; in its own field a plain number too. Without a unit it is an error:
    86400 would be less than a millisecond.
    """
    if isinstance(value, str):
        return kind(durations.parse(value))
    if kind is FlushFrequency and isinstance(value, int) and not isinstance(value, bool):
        return kind(value)
    raise ValueError(f"{value!r} is no duration such as 30s or 1h30m")


def _take_out(values: dict[str, Any], error: str) -> Wrong:
    """Removes the value that the error is about, or empties it where it is an element."""
    found = _WHERE.fullmatch(error)
    if not found or not found["path"]:
        raise ConfigurationError(error)
    steps = _STEP.findall(found["path"].removesuffix(_SOMEWHERE))
    *way, last = [name or int(index) for name, index in steps]
    path, at = "", cast(Any, values)
    for step in way:
        path, at = join(path, step), at[step]
    if found["path"].endswith(_SOMEWHERE):
        path, at = join(path, last), at[last]
        last = next(name for name, value in at.items() if not isinstance(value, bool))
    if isinstance(last, int):
        at[last] = {} if found["reason"].startswith("Expected `object`") else ""
    else:
        del at[last]
    return Wrong(join(path, last), found["reason"].replace("`", ""))


class Document(NamedTuple):
    """The values, and the paths of fields that are there twice."""

    values: dict[str, Any]
    duplicates: tuple[str, ...]


def parse(data: bytes) -> Document:
    """Raises ValueError, fit to be shown, for what is no mapping in YAML or JSON."""
    try:
        return _document(data)
    except RecursionError as error:
        raise ValueError("neither YAML nor JSON: nested too deeply") from error


def _document(data: bytes) -> Document:
    duplicates: list[str] = []
    try:
        values = _json(data, duplicates)
    except (ValueError, RecursionError):
        duplicates.clear()
        values = _yaml(data, duplicates)
    if not isinstance(values, dict):
        raise ValueError("there is no mapping in it: is it written to the end?")
    return Document(_without_nulls(values), tuple(dict.fromkeys(duplicates)))


def _json(data: bytes, duplicates: list[str]) -> Any:
    """Where it was found is not known, so a duplicate is named by its name alone."""

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates.extend(_repeated(name for name, _ in pairs))
        return dict(pairs)

    return json.loads(data, object_pairs_hook=mapping)


def _yaml(data: bytes, duplicates: list[str]) -> Any:
    try:
        check_depth(data)
        loader = Loader(data)
        try:
            node = loader.get_node() if loader.check_node() else None
            if node is None:
                return None
            duplicates.extend(_twice(node, ""))
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"neither YAML nor JSON: {' '.join(str(error).split())}") from error


def _twice(node: yaml.Node, path: str) -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        names = [str(key.value) for key, _ in node.value]
        yield from (join(path, name) for name in _repeated(names))
        for name, (_, value) in zip(names, node.value, strict=True):
            yield from _twice(value, join(path, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _twice(value, join(path, index))


def _repeated(names: Any) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _without_nulls(value: Any) -> Any:
    """In a file null is as good as nothing; in a list it is an element."""
    if isinstance(value, dict):
        return {str(k): _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
