# SPDX-License-Identifier: Apache-2.0
"""How many connections the endpoints of a slice get, by its annotation."""

import pytest

from ebpflb.model import annotations, endpoint_slices, endpoints, services
from ebpflb.model.endpoints import Topology, select
from tests.model import builders
from tests.model.builders import annotated


def weighted(text: str | None) -> tuple[endpoint_slices.StoredSlice, tuple[str, ...]]:
    given = annotated(annotations.WEIGHT_ANNOTATION, text)
    entry = builders.entry("10.1.0.1", nodeName="node")
    found, warnings = endpoint_slices.read(builders.slice(entry, annotations=given))
    assert found
    return found, warnings


@pytest.mark.parametrize(
    ("text", "weight"), [(None, 100), ("0", 0), ("1", 1), ("11", 11), ("1000", 1000)]
)
def test_annotation_of_a_slice(text: str | None, weight: int) -> None:
    found, warnings = weighted(text)
    assert (found.weight, warnings) == (weight, ())


@pytest.mark.parametrize("text", ["", "-1", "1001", "ten", "1.5", "00001", "²", " 5"])
def test_what_cannot_be_read_is_a_warning_and_counts_as_100(text: str) -> None:
    found, warnings = weighted(text)
    assert found.weight == 100
    where = "metadata.annotations[ebpflb.io/weight]"
    assert warnings == (f'{where}: "{text}" is not a number from 0 to 1000, so it is 100',)


def test_a_service_has_no_weight() -> None:
    """An annotation of weight on a Service is reported, with its right place."""
    found = services.parse(builders.service(annotations={annotations.WEIGHT_ANNOTATION: "11"}))
    where = "metadata.annotations[ebpflb.io/weight]"
    assert found.warnings == (f"{where}: has no effect on a Service: set it on its EndpointSlices",)


@pytest.mark.parametrize("name", ["scheduler", "on-removal", "slow-start"])
def test_a_slice_has_no_annotation_of_a_service(name: str) -> None:
    """A Service's annotation on a slice is reported too."""
    slice = builders.slice(annotations={f"ebpflb.io/{name}": "reset"})
    _, warnings = endpoint_slices.read(slice)
    where = f"metadata.annotations[ebpflb.io/{name}]"
    assert warnings == (f"{where}: has no effect on an EndpointSlice: set it on the Service",)


@pytest.mark.parametrize("weight", [0, 5])
def test_weight_0_gets_nothing_new(weight: int) -> None:
    """An endpoint of weight 0 keeps its connections: it is in the block, but in no list."""
    port = builders.only_port(builders.service())
    found = endpoints.merge([weighted(str(weight))[0]], port.name, "node")
    selected = select(found, Topology("node", ""))
    assert selected.serving == found
    assert selected.cluster == (found if weight else ())
    assert selected.has_any == bool(weight)
