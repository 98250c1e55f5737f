# SPDX-License-Identifier: Apache-2.0
"""How many connections endpoints get, against those of other slices: by a slice's annotation.

A slice that a person or a canary's controller adds gets a part of the traffic so. 0: no new
connections; those that there are go on.
"""

from collections.abc import Iterator

from ebpflb.model import objects
from ebpflb.model.annotations import annotation_field

WEIGHT_ANNOTATION = objects.WEIGHT
DEFAULT_WEIGHT, MOST = 100, 1000


def of(slice: objects.EndpointSlice) -> int:
    """Of each of its endpoints; what cannot be read counts as DEFAULT_WEIGHT."""
    weight = _read(_text(slice))
    return DEFAULT_WEIGHT if weight is None else weight


def warnings(slice: objects.EndpointSlice) -> Iterator[str]:
    """One, if the annotation cannot be read."""
    text = _text(slice)
    if _read(text) is None:
        field = annotation_field(WEIGHT_ANNOTATION)
        yield f'{field}: "{text}" is not a number from 0 to {MOST}, so it is {DEFAULT_WEIGHT}'


def _text(slice: objects.EndpointSlice) -> str:
    text = slice.metadata.annotation(WEIGHT_ANNOTATION)
    return str(DEFAULT_WEIGHT) if text is None else text


def _read(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MOST))
    return int(text) if is_number and int(text) <= MOST else None
