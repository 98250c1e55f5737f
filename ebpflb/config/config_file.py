# SPDX-License-Identifier: Apache-2.0
"""A configuration file -> plain values -> KubeProxyConfiguration with its defaults.

As in kube-proxy (kube-proxy.md 15), unknown and duplicate fields are logged and otherwise ignored:
the last value of a duplicate field and the first of several documents are used. A value of the
wrong type is an error. All such errors are found in one pass: each invalid value is removed, and
the rest is converted again.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args, get_origin

import msgspec
import yaml

from ebpflb import files
from ebpflb.cluster import manifest_file
from ebpflb.config import fields, listen_addresses
from ebpflb.config.fields import KubeProxyConfiguration, Section, join_path, value_at
from ebpflb.errors import ConfigurationError, in_json_words, one_line
from ebpflb.model import durations
from ebpflb.model.durations import Duration, FlushFrequency

log = logging.getLogger(__name__)

# The end of msgspec's messages: the place of the value, as "$.a.b[0]".
_PLACE = re.compile(r"(?P<reason>.*) - at `(?:key in )?\$(?P<path>.*)`", re.DOTALL)
_ANY_KEY = "[...]"  # msgspec does not name the key of a mapping; featureGates is the only one
_STEP = re.compile(r"\.([^.\[]+)|\[([0-9]+)\]")


class FieldError(NamedTuple):
    """The path of an invalid field, and the error of its value."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class ParsedConfiguration(NamedTuple):
    """A configuration, and its invalid fields, which have their default value."""

    configuration: KubeProxyConfiguration
    errors: tuple[FieldError, ...]


class Document(NamedTuple):
    """The values of a file without nulls, and the paths of duplicate fields."""

    values: dict[str, Any]
    duplicates: tuple[str, ...]


def read(path: Path) -> ParsedConfiguration:
    """Read the file.

    Raises ConfigurationError if the file is missing or is not a KubeProxyConfiguration.
    """
    try:
        document = parse(files.read_regular(path))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (files.UnusableFile, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    _check_kind(path, document.values)
    unknown = list(_unknown(KubeProxyConfiguration, document.values, ""))
    if unknown:
        log.warning("%s: unknown fields are ignored: %s", path, ", ".join(unknown))
    if document.duplicates:
        duplicates = ", ".join(document.duplicates)
        log.warning("%s: duplicate fields, the last value is used: %s", path, duplicates)
    return to_configuration(document.values)


def parse(data: bytes) -> Document:
    """Parse the first YAML document, or JSON.

    Raises ValueError, with a message for the operator, if it is not a mapping.
    """
    try:
        return _parse(data)
    except RecursionError as error:
        raise ValueError("neither YAML nor JSON: nested too deeply") from error


def _parse(data: bytes) -> Document:
    duplicates: list[str] = []
    try:
        values = _parse_json(data, duplicates)
    except (ValueError, RecursionError):
        duplicates.clear()
        values = _parse_yaml(data, duplicates)
    if not isinstance(values, dict):
        raise ValueError("not a mapping of fields: is the file complete?")
    return Document(_without_nulls(values), tuple(dict.fromkeys(duplicates)))


def _parse_json(data: bytes, duplicates: list[str]) -> Any:
    """Parse JSON; a duplicate is reported without its path, which the module json does not give."""

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        duplicates.extend(_repeated(name for name, _ in pairs))
        return dict(pairs)

    return json.loads(data, object_pairs_hook=mapping)


def _parse_yaml(data: bytes, duplicates: list[str]) -> Any:
    try:
        manifest_file.check_values(data)
        loader = manifest_file.Loader(data)
        try:
            node = loader.get_node() if loader.check_node() else None
            if node is None:
                return None
            duplicates.extend(_duplicates(node, ""))
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except Exception as error:  # PyYAML's constructors raise any
        reason = one_line(manifest_file.describe_yaml_error(error))
        raise ValueError(f"neither YAML nor JSON: {reason}") from error


def _duplicates(node: yaml.Node, path: str) -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        names = [str(key.value) for key, _ in node.value]
        yield from (join_path(path, name) for name in _repeated(names))
        for name, (_, value) in zip(names, node.value, strict=True):
            yield from _duplicates(value, join_path(path, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _duplicates(value, join_path(path, index))


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _without_nulls(value: Any) -> Any:
    """Return the value without null fields, which count as not set; null elements of lists stay."""
    if isinstance(value, dict):
        return {str(k): _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


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
    """Yield the paths of fields that a section of this type does not have."""
    if not isinstance(values, dict):
        return
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for name, value in values.items():
        if name not in known:
            yield join_path(path, name)
            continue
        inner = known[name]
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _unknown(inner, value, join_path(path, name))
        elif get_origin(inner) is tuple and issubclass(get_args(inner)[0], Section):
            for index, each in enumerate(value if isinstance(value, list) else ()):
                at = join_path(join_path(path, name), index)
                yield from _unknown(get_args(inner)[0], each, at)


def to_configuration(values: dict[str, Any]) -> ParsedConfiguration:
    """Convert plain values to fields; invalid values are removed from ``values``."""
    errors: list[FieldError] = []
    while True:
        try:
            converted = msgspec.convert(values, KubeProxyConfiguration, dec_hook=decode)
            break
        except msgspec.ValidationError as error:
            errors.append(_remove_invalid(values, str(error)))
    explicit = {path for path in listen_addresses.LISTEN_FIELDS if value_at(converted, path)}
    with_defaults = fields.with_defaults(converted)
    return ParsedConfiguration(
        listen_addresses.complete_listen_address(with_defaults, explicit), tuple(errors)
    )


def decode(kind: type[Duration], value: Any) -> Duration:
    """Decode a duration for msgspec.

    A duration is text; only flushFrequency may be a number, of nanoseconds. In any other field a
    number is an error: 86400 would be less than a millisecond.
    """
    if isinstance(value, str):
        return kind(durations.parse(value))
    if kind is FlushFrequency and isinstance(value, int) and not isinstance(value, bool):
        return kind(value)
    raise ValueError(f"{value!r} {durations.NOT_A_DURATION}")


def _remove_invalid(values: dict[str, Any], message: str) -> FieldError:
    """Remove the value that msgspec's message concerns.

    An element of a list is replaced by an empty one, so that the indexes of the others stay right.
    """
    found = _PLACE.fullmatch(message)
    if not found or not found["path"]:
        raise ConfigurationError(in_json_words(message))
    steps = _STEP.findall(found["path"].removesuffix(_ANY_KEY))
    *parents, last = [name or int(index) for name, index in steps]
    path, at = "", cast(Any, values)
    for step in parents:
        path, at = join_path(path, step), at[step]
    if found["path"].endswith(_ANY_KEY):
        path, at = join_path(path, last), at[last]
        last = next(name for name, value in at.items() if not isinstance(value, bool))
    if isinstance(last, int):
        at[last] = {} if found["reason"].startswith("Expected `object`") else ""
    else:
        del at[last]
    return FieldError(join_path(path, last), in_json_words(found["reason"]))
