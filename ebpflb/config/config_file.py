# SPDX-License-Identifier: Apache-2.0
"""A configuration file -> plain values -> KubeProxyConfiguration with its defaults.

As in kube-proxy (kube-proxy.md 15), unknown and duplicate fields are logged and otherwise ignored:
the last value of a duplicate field and the first of several documents are used. The first value of
a wrong type is an error.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
import yaml

from ebpflb import files
from ebpflb.cluster import decoding, manifests
from ebpflb.config import fields, listen_addresses
from ebpflb.config.fields import KubeProxyConfiguration, Section, join_path, value_at
from ebpflb.errors import ConfigurationError, InvalidObject, one_line
from ebpflb.model import durations
from ebpflb.model.durations import Duration, FlushFrequency

log = logging.getLogger(__name__)


class Document(NamedTuple):
    """The values of a file without nulls, and the paths of duplicate fields."""

    values: dict[str, Any]
    duplicates: tuple[str, ...]


def read(path: Path) -> KubeProxyConfiguration:
    """Read the file.

    Raises ConfigurationError if the file is missing, is not a KubeProxyConfiguration, or has a
    value of a wrong type.
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
    try:
        return to_configuration(document.values)
    except InvalidObject as error:
        raise ConfigurationError(f"the configuration is invalid:\n  {path}: {error}") from None


def parse(data: bytes) -> Document:
    """Parse the first YAML document, or JSON.

    Raises ValueError, with a message for the operator, if it is not a mapping.
    """
    duplicates: list[str] = []
    try:
        values = _parse_json(data, duplicates)
    except ValueError:
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
        loader = manifests.Loader(data)
        try:
            node = loader.get_node() if loader.check_node() else None
            if node is None:
                return None
            duplicates.extend(_duplicates(node, ""))
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except Exception as error:  # PyYAML's constructors raise any
        reason = one_line(manifests.describe_yaml_error(error))
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


def to_configuration(values: dict[str, Any]) -> KubeProxyConfiguration:
    """Convert plain values to fields. Raises InvalidObject for a value of the wrong type."""
    try:
        converted = msgspec.convert(values, KubeProxyConfiguration, dec_hook=decode)
    except msgspec.ValidationError as error:
        raise decoding.invalid_object(error) from error
    explicit = {path for path in listen_addresses.LISTEN_FIELDS if value_at(converted, path)}
    return listen_addresses.complete_listen_address(fields.with_defaults(converted), explicit)


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
