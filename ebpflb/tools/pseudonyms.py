# SPDX-License-Identifier: Apache-2.0
"""Replaces a cluster's names and addresses with pseudonyms, the same ones in every text."""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from ipaddress import ip_address

from ebpflb.model.addresses import Address

# Every cluster has these; and the words that `explain` has for clients.
_KEPT = {"default", "kube-system", "kubernetes", "kube-dns", "node", "outside", "address", "ebpflb"}
_FIELDS = re.compile(r'"(?:namespace|name|pod|node|target|source_node)": "([^"\\\n]+)"')
_NODE = re.compile(r"\bNode ([a-z0-9][a-z0-9.-]*)")
_OBJECT = re.compile(
    r'(?:\b(?:Service|EndpointSlice|Pod) |"service": ")([a-z0-9][a-z0-9.-]*)/([a-z0-9][a-z0-9.-]*)'
)
_TOKEN = re.compile(
    r"""(?x) (?P<address> (?<![\w.:]) (?:
            \d{1,3}(?:\.\d{1,3}){3}
          | [0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:\.\d{1,3}){0,3} ) (?![\w]))
      | (?P<pair> (?<![\w./-]) [a-z0-9][a-z0-9.-]*/[a-z0-9][a-z0-9.-]*
            (?= /(?:TCP|UDP|SCTP)\b | (?![\w/]) ))
      | (?P<word> [A-Za-z0-9][\w.-]*)"""
)
_MAC_COLONS = 5
_LONGEST = 253  # characters of a name in Kubernetes


class Pseudonyms:
    """With the same key the same names get the same pseudonyms, in the reports of all nodes.

    Addresses keep their common prefixes: a subnet stays a subnet.
    """

    def __init__(self, key: bytes, names: set[str]) -> None:
        """``names`` are replaced everywhere, and so is all text of the form A/B."""
        self._key, self._names = key[:64], names - _KEPT
        self._address = cache(self._address)  # type: ignore[method-assign]

    def replace(self, text: str) -> str:
        """Return the text with pseudonyms. Keys of JSON stay, unless they have the form A/B."""
        return _TOKEN.sub(self._token, text)

    def _token(self, found: re.Match[str]) -> str:
        text = found[0]
        if found["address"]:
            return self._place(text)
        if found["pair"]:
            first, _, second = text.partition("/")
            return text if first.isdigit() else f"{self._name(first)}/{self._name(second)}"
        is_key = found.string[found.start() - 1 : found.start()] == '"' and (
            found.string[found.end() : found.end() + 2] == '":'
        )
        return text if is_key else self._word(text)

    def _word(self, text: str) -> str:
        """Replace a known name, a name that begins with it (a pod's), or parts of a DNS name."""
        if len(text) > _LONGEST:
            return text
        begins = text.split("-")
        if any("-".join(begins[:count]) in self._names for count in range(len(begins), 0, -1)):
            return self._name(text)
        parts = text.split(".")
        return ".".join(self._name(each) if each in self._names else each for each in parts)

    def _name(self, text: str) -> str:
        return text if text in _KEPT else f"name-{self._hash(text, 5).hex()}"

    def _place(self, text: str) -> str:
        with suppress(ValueError):
            return str(self._address(ip_address(text)))
        if text.count(":") == _MAC_COLONS and "::" not in text:
            return ":".join(["02", *(f"{it:02x}" for it in self._hash(text.lower(), 5))])
        return text

    def _address(self, address: Address) -> Address:
        """Flip each bit or not, by a hash of the bits before it."""
        if address.is_loopback or address.is_unspecified or address.is_multicast:
            return address
        value, length, made = int(address), address.max_prefixlen, 0
        for left in range(length - 1, -1, -1):
            flip = self._hash(f"{length} {left} {value >> (left + 1)}", 1)[0] & 1
            made = made << 1 | (value >> left & 1) ^ flip
        return type(address)(made)

    def _hash(self, text: str, size: int) -> bytes:
        return blake2b(text.encode(), key=self._key, digest_size=size).digest()


def names_in(text: str) -> Iterator[str]:
    """Yield the names of namespaces, Services, nodes and pods in a command's output."""
    for name in _FIELDS.findall(text):
        yield from name.split("/")
    yield from _NODE.findall(text)
    for pair in _OBJECT.findall(text):
        yield from pair
