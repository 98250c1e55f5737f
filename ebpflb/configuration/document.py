# SPDX-License-Identifier: Apache-2.0
"""The text of a configuration file as plain values, without what says nothing: nulls.

YAML as kubectl reads it, or JSON. Of several documents the first counts, of a field that is there
twice the last: so does kube-proxy, which then says so (kube-proxy.md 15).
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from ebpflb.cluster.documents import Loader, check_depth
from ebpflb.configuration.fields import join


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
