# SPDX-License-Identifier: Apache-2.0
"""How many connections the endpoints of a slice get, by its annotation."""

import pytest

from ebpflb.model import annotations, endpoint_slices
from tests.model import builders
from tests.model.builders import annotated


def weighted(text: str | None) -> tuple[endpoint_slices.StoredSlice, tuple[str, ...]]:
    given = annotated(annotations.WEIGHT_ANNOTATION, text)
    entry = builders.entry("10.1.0.1", nodeName="node")
    found, warnings = endpoint_slices.read(builders.slice(entry, annotations=given))
    assert found
    return found, warnings


@pytest.mark.parametrize("text", ["", "-1", "1001", "ten", "1.5", "00001", "²", " 5"])
def test_what_cannot_be_read_is_a_warning_and_counts_as_100(text: str) -> None:
    found, warnings = weighted(text)
    assert found.weight == 100
    where = "metadata.annotations[ebpflb.io/weight]"
    assert warnings == (f'{where}: "{text}" is not a number from 0 to 1000, so it is 100',)


@pytest.mark.parametrize("name", ["scheduler", "on-removal", "slow-start"])
def test_a_slice_has_no_annotation_of_a_service(name: str) -> None:
    """A Service's annotation on a slice is reported too."""
    slice = builders.slice(annotations={f"ebpflb.io/{name}": "reset"})
    _, warnings = endpoint_slices.read(slice)
    where = f"metadata.annotations[ebpflb.io/{name}]"
    assert warnings == (f"{where}: has no effect on an EndpointSlice: set it on the Service",)
