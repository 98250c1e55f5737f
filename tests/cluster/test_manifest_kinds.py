# SPDX-License-Identifier: Apache-2.0
"""A misspelt kind is named with what was probably meant; kinds of others are left alone."""

from pathlib import Path

import pytest

from ebpflb.cluster import manifest_file
from ebpflb.errors import InvalidObject
from ebpflb.model.events import Kind
from tests.cluster.event_log import EventLog, Start


@pytest.mark.parametrize(
    ("api_version", "kind", "words"),
    [
        ("v1", "Servic", "kind: v1 has no Servic: did you mean Service?"),
        ("v1", "service", "kind: v1 has no service: did you mean Service?"),
        ("v1", "ServiceList", "kind: v1 has no ServiceList: did you mean Service?"),
        ("v1", "Lst", "kind: v1 has no Lst: did you mean List?"),
        ("v1", "Whatever", "kind: v1 has no Whatever"),
        (
            "discovery.k8s.io/v1",
            "EndpointSlices",
            "kind: discovery.k8s.io/v1 has no EndpointSlices: did you mean EndpointSlice?",
        ),
        (
            "discovery.k8s.io/v1beta1",
            "EndpointSlice",
            "apiVersion: discovery.k8s.io/v1beta1 has no EndpointSlice:"
            " did you mean discovery.k8s.io/v1?",
        ),
        (
            "v1",
            "EndpointSlice",
            "apiVersion: v1 has no EndpointSlice: did you mean discovery.k8s.io/v1?",
        ),
        (
            "discovry.k8s.io/v1",
            "EndpointSlice",
            "apiVersion: discovry.k8s.io/v1 has no EndpointSlice:"
            " did you mean discovery.k8s.io/v1?",
        ),
        ("v2", "Service", "apiVersion: v2 has no Service: did you mean v1?"),
    ],
)
def test_a_misspelt_kind_is_named_with_what_was_meant(
    api_version: str, kind: str, words: str
) -> None:
    """The field, the value, and the most similar right one."""
    with pytest.raises(InvalidObject) as failed:
        manifest_file.read_kind(api_version, kind)
    assert str(failed.value) == words


@pytest.mark.parametrize(
    ("api_version", "kind"),
    [
        ("v1", "ServiceAccount"),
        ("v1", "Endpoints"),
        ("v1", "Secret"),
        ("networking.k8s.io/v1", "Ingress"),
        ("apps/v1", "Deployment"),
        ("serving.knative.dev/v1", "Service"),
        ("gateway.networking.k8s.io/v1", "Gateway"),
    ],
)
def test_kinds_of_others_are_skipped(api_version: str, kind: str) -> None:
    """Other kinds are skipped, however similar their names are."""
    assert manifest_file.read_kind(api_version, kind) is None


@pytest.mark.parametrize(("api_version", "kind"), manifest_file.KINDS)
def test_our_kinds(api_version: str, kind: str) -> None:
    """Each is read."""
    assert manifest_file.read_kind(api_version, kind) is Kind(kind)


def test_a_misspelt_kind_is_an_error_of_its_file(
    folder: Path, events: EventLog, follow: Start
) -> None:
    """A misspelt kind is reported with file and document, until it is corrected."""
    file = folder / "web.yaml"
    file.write_text("apiVersion: v1\nkind: Servic\nmetadata: {name: web}\n")
    follow()
    said = events.source_status()
    assert said.source == str(file)
    assert said.error == "document 1: kind: v1 has no Servic: did you mean Service?"
    file.write_text("apiVersion: v1\nkind: Service\nmetadata: {name: web}\n")
    assert events.source_status().error is None
