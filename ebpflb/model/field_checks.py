# SPDX-License-Identifier: Apache-2.0
"""Checks of single fields: each returns the value, or raises InvalidObject that names the field.

kube-proxy relies on the API server's validation, which manifests do not go through.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from ebpflb import errors

PORTS = range(1, 1 << 16)

_Meaning = TypeVar("_Meaning")


def filled(field: str, value: str) -> str:
    if not value:
        raise errors.InvalidObject(field, "is empty")
    return value


def within(field: str, value: int, allowed: range) -> int:
    if value not in allowed:
        raise errors.InvalidObject(field, f"{value} is not in {allowed[0]}..{allowed[-1]}")
    return value


def one_of(field: str, value: str, meanings: Mapping[str, _Meaning]) -> _Meaning:
    if value not in meanings:
        raise errors.InvalidObject(field, f'"{value}" is not one of {", ".join(meanings)}')
    return meanings[value]


def parsed(field: str, parse: Callable[[str], _Meaning], text: str) -> _Meaning:
    """``parse`` raises ValueError with a message for the operator."""
    try:
        return parse(text)
    except ValueError as error:
        raise errors.InvalidObject(field, str(error)) from error
