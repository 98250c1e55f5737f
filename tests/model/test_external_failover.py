# SPDX-License-Identifier: Apache-2.0
"""Services whose packets without an endpoint go on to the network (docs/external-failover.md)."""

from itertools import product
from typing import Any

import pytest

from ebpflb.model import services
from ebpflb.model.annotations import FAILOVER_ANNOTATION, FAILOVER_POLICIES
from ebpflb.model.services import ParsedService
from tests.model import builders
from tests.model.builders import annotated

FIELD, ANNOTATED = "spec.externalFailoverPolicy", f"metadata.annotations[{FAILOVER_ANNOTATION}]"


def parsed(
    annotation: str | None, field: str | None, policy: str | None = "Local"
) -> ParsedService:
    spec: dict[str, Any] = {"type": "LoadBalancer", "externalTrafficPolicy": policy}
    spec["externalFailoverPolicy"] = field
    given = annotated(FAILOVER_ANNOTATION, annotation)
    return services.parse(builders.dual_stack(annotations=given, **spec))


@pytest.mark.parametrize(
    ("annotation", "field"), list(product((None, *FAILOVER_POLICIES), repeat=2))
)
def test_the_annotation_takes_precedence(annotation: str | None, field: str | None) -> None:
    """The annotation overrides the field; without both, packets without an endpoint are dropped or
    refused.
    """
    found = parsed(annotation, field)
    assert [it.passthrough for it in found.ports] == [(annotation or field) == "Passthrough"] * 2
    assert not found.warnings


def test_an_unknown_value_of_the_field_is_a_warning() -> None:
    """A value from a later Kubernetes must not cost the Service its endpoints."""
    found = parsed(None, "Elsewhere")
    assert [it.passthrough for it in found.ports] == [False] * 2
    assert found.warnings == (
        f'{FIELD}: "Elsewhere" is not one of None, Passthrough, so it is None',
    )


@pytest.mark.parametrize("policy", [None, "Cluster"])
@pytest.mark.parametrize(
    ("annotation", "field", "where"),
    [("Passthrough", None, ANNOTATED), (None, "Passthrough", FIELD)],
)
def test_no_effect_without_policy_local(
    policy: str | None, annotation: str | None, field: str | None, where: str
) -> None:
    """Under policy Cluster the endpoints of all nodes serve."""
    found = parsed(annotation, field, policy)
    assert [it.passthrough for it in found.ports] == [False] * 2
    assert found.warnings == (f"{where}: has no effect without externalTrafficPolicy Local",)
