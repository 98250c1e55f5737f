# SPDX-License-Identifier: Apache-2.0
"""Annotations that cannot be read are named once each, in the log and by an event; the Service is
served with the defaults.
"""

from typing import Any

import pytest

from ebpflb.lab import manifests
from ebpflb.model import annotations, objects
from ebpflb.model.events import Key as ObjectKey
from ebpflb.model.events import Kind
from tests.agent.fakes import Harness, changed, listed, service, slices

SERVICE_ANNOTATIONS = (
    annotations.SCHEDULER_ANNOTATION,
    annotations.SLOW_START_ANNOTATION,
    annotations.ON_REMOVAL_ANNOTATION,
    annotations.FAILOVER_ANNOTATION,
)
HOSTILE = "a\nb\x1b[2J" + "x" * 100_000


def annotated(each: Any, annotation: str, text: Any) -> Any:
    each["metadata"]["annotations"] = {annotation: text}
    return each


@pytest.mark.parametrize("text", ["", "Random", "-1", "1e9s", HOSTILE])
@pytest.mark.parametrize("annotation", SERVICE_ANNOTATIONS)
def test_of_a_service(
    harness: Harness, caplog: pytest.LogCaptureFixture, annotation: str, text: str
) -> None:
    """The message is one printable line, however long or hostile the value."""
    wrong = annotated(service("a", "10.96.0.1"), annotation, text)
    harness.start()
    harness.send(listed(Kind.SERVICE, wrong), listed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.1")))
    harness.send(listed(Kind.NODE, manifests.node("node-1", "192.0.2.1")))
    harness.send(changed(Kind.SERVICE, wrong | {"status": {}}))
    (event,) = harness.annotations
    assert (event.kind, event.key) == (Kind.SERVICE, ObjectKey("default", "a"))
    assert event.reason.startswith(f"metadata.annotations[{annotation}]: ")
    assert event.reason.isprintable() and len(event.reason) < 500
    said = [it.getMessage() for it in caplog.records if annotation in it.getMessage()]
    assert said == [str(event)]
    assert harness.status.service_ports == harness.status.backends == 1


@pytest.mark.parametrize("name", ["schedular", "nodeport-source-range", "ports", HOSTILE])
def test_of_a_name_that_none_has(harness: Harness, name: str) -> None:
    """Unknown annotations with our prefix: all removed ones are named, but only the first misspelt
    one.
    """
    names = {objects.OURS + name: "maglev", objects.OURS + "zzz": "1", "example.org/weight": "1"}
    web = service("a", "10.96.0.1")
    web["metadata"]["annotations"] = names
    slice = annotated(slices("a", "10.1.0.1"), objects.OURS + name, "7")
    harness.start()
    harness.send(listed(Kind.SERVICE, web), listed(Kind.ENDPOINT_SLICE, slice))
    harness.send(listed(Kind.NODE, manifests.node("node-1", "192.0.2.1")))
    assert {event.kind for event in harness.annotations} == {Kind.SERVICE, Kind.ENDPOINT_SLICE}
    assert len(harness.annotations) == (3 if name == "ports" else 2)
    for event in harness.annotations:
        assert event.reason.startswith("metadata.annotations[ebpflb.io/")
        assert event.reason.isprintable() and len(event.reason) < 500
        is_removed = "[ebpflb.io/ports]: was removed: list each port in spec.ports" in event.reason
        is_unknown = "has no effect: it is not one of ebpflb.io/" in event.reason
        assert name == HOSTILE or is_removed or is_unknown
    assert harness.status.service_ports == harness.status.backends == 1


def test_no_tenant_fills_the_log(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """An annotation that changes a thousand times is logged 25 times; another annotation is still
    logged.
    """
    harness.start()
    harness.send(listed(Kind.SERVICE), listed(Kind.ENDPOINT_SLICE))

    def wrong(name: str, text: str) -> Any:
        return changed(
            Kind.SERVICE,
            annotated(service(name, "10.96.0.1"), annotations.SCHEDULER_ANNOTATION, text),
        )

    harness.send(*(wrong("a", f"flood-{number}") for number in range(1000)), wrong("b", "mistake"))
    told = [line for line in caplog.messages if annotations.SCHEDULER_ANNOTATION in line]
    assert [len([line for line in told if text in line]) for text in ("flood-", "mistake")] == [
        25,
        1,
    ]
    assert len(harness.annotations) == 26
