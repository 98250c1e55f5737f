# SPDX-License-Identifier: Apache-2.0
"""Nested netlink attributes as data: to be sent, and to be compared with what the kernel has."""

from collections.abc import Mapping, Sequence
from typing import Union

from ebpflb.node.netlink_attributes import attribute, attributes, each, nested

Tree = Mapping[int, Union[bytes, "Tree", Sequence["Tree"]]]
"""Kind -> content. A list has attributes of kind 1 (NFTA_LIST_ELEM)."""

_LIST_ITEM = 1


def encode(tree: Tree) -> bytes:
    """The attributes in the order of the tree."""
    return b"".join(_encode_one(kind, content) for kind, content in tree.items())


def _encode_one(kind: int, content: bytes | Tree | Sequence[Tree]) -> bytes:
    if isinstance(content, bytes):
        return attribute(kind, content)
    if isinstance(content, Mapping):
        return nested(kind, encode(content))
    return nested(kind, *(_encode_one(_LIST_ITEM, item) for item in content))


def has_attributes(data: bytes, tree: Tree) -> bool:
    """Whether all attributes of the tree are in the data; the data may have more.

    Within a nested attribute all others must be 0: newer kernels send more attributes. An empty
    tree stands for any content. The kernel leaves out some attributes that are 0.
    """
    existing = attributes(data)
    return all(_equals(existing.get(kind), content) for kind, content in tree.items())


def _equals(data: bytes | None, content: bytes | Tree | Sequence[Tree]) -> bool:
    if data is None:
        return isinstance(content, bytes) and not any(content)
    if isinstance(content, bytes):
        return data == content
    if isinstance(content, Mapping):
        others = (value for kind, value in attributes(data).items() if kind not in content)
        return not content or (has_attributes(data, content) and not any(map(any, others)))
    items = list(each(data))
    return len(items) == len(content) and all(map(has_attributes, items, content))
