# SPDX-License-Identifier: Apache-2.0
"""Bad input in a manifest is reported by name, the rest is served, and the last good state is
kept.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebpflb.cluster.manifests import ManifestDirectory
from ebpflb.errors import ClusterError, InvalidObject
from ebpflb.model.events import Changed, Event, Key, Kind, Removed, Replaced, SourceStatus
from ebpflb.model.objects import Service
from tests.cluster.objects import service
from tests.kit.api_history import Json


class Manifests:
    """A folder that is scanned by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = ManifestDirectory(path, "node-1")
        self.statuses: list[SourceStatus] = []

    def write(self, *documents: Json | str, name: str = "a.yaml") -> None:
        """Write text unchanged, and any other content as YAML."""
        texts = (it if isinstance(it, str) else yaml.safe_dump(it) for it in documents)
        (self.path / name).write_text("\n---\n".join(texts))

    def first(self) -> dict[Kind, Replaced]:
        """Return the Replaced of the first scan, by kind."""
        events = self.folder.scan()
        self.statuses = [it for it in events if isinstance(it, SourceStatus)]
        return {event.kind: event for event in events if isinstance(event, Replaced)}

    def only_service(self) -> Any:
        (found,) = self.first()[Kind.SERVICE].objects.values()
        return found.object

    def services(self) -> set[str]:
        return {key.name for key in self.first()[Kind.SERVICE].objects}

    def news(self) -> list[str]:
        """Return the events of a changed file as short words."""
        events = self.folder.read({"a.yaml"})
        self.statuses = [it for it in events if isinstance(it, SourceStatus)]
        return [_short(event) for event in events if not isinstance(event, SourceStatus)]

    def error(self, name: str = "a.yaml") -> str | None:
        """Return the error of the only file that was just reported."""
        (status,) = self.statuses
        assert status.source == str(self.path / name)
        return status.error


def _short(event: Event) -> str:
    if isinstance(event, Changed):
        broken = isinstance(event.found.object, InvalidObject)
        return f"!{event.key.name}: {event.found.object}" if broken else f"+{event.key.name}"
    assert isinstance(event, Removed)
    return f"-{event.key.name}"


@pytest.fixture
def manifests(folder: Path) -> Manifests:
    return Manifests(folder)


def test_a_file_that_is_no_yaml_keeps_all_its_objects(manifests: Manifests) -> None:
    """A file with bad YAML is an error, with the place.

    When the file is mended, the difference is emitted.
    """
    manifests.write(service("a"), service("b"))
    manifests.first()
    manifests.write(service("a"), "spec: [")
    assert manifests.news() == []
    reason = manifests.error()
    assert reason and reason.startswith("neither YAML nor JSON: ") and "line " in reason
    manifests.write(service("a"))
    assert manifests.news() == ["-b"]
    assert manifests.error() is None


def test_a_file_that_may_not_be_read_keeps_its_objects(manifests: Manifests) -> None:
    """A file with wrong permissions keeps its objects.

    The refusal is simulated, since root may read all files.
    """
    manifests.write(service("a"))
    manifests.first()
    (manifests.path / "a.yaml").unlink()
    (manifests.path / "a.yaml").symlink_to("a.yaml")  # a loop: ELOOP to stat and to open
    assert manifests.news() == []
    assert manifests.error() == "Too many levels of symbolic links"


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("just text", "document: not a mapping"),
        ("[1, 2]", "document: not a mapping"),
        ("spec: {}", "apiVersion: expected a name, got None"),
        ("{apiVersion: v1}", "kind: expected a name, got None"),
        ("{apiVersion: v1, kind: 7}", "kind: expected a name, got 7"),
        ("{apiVersion: v1, kind: Service}", "metadata: not a mapping"),
        ("{apiVersion: v1, kind: Service, metadata: {}}", "metadata.name: expected a name"),
        ("{apiVersion: v1, kind: Node, metadata: {name: 5}}", "metadata.name: expected a name"),
    ],
)
def test_a_document_without_identity_is_an_error(
    manifests: Manifests, document: str, reason: str
) -> None:
    """A document without identity is an error, with its place, and no object is removed.

    The document may be any of the file's objects.
    """
    manifests.write(service("a"), service("b"))
    manifests.first()
    manifests.write(service("a"), document, service("c"))
    assert manifests.news() == ["+c"]
    assert str(manifests.error()).startswith(f"document 2: {reason}")


def test_an_object_that_does_not_fit_is_told_as_such(manifests: Manifests) -> None:
    """An invalid object is reported with the wrong field; the rest of the file is served."""
    manifests.write(service("a"), service("b"))
    manifests.first()
    manifests.write(service("a", ports=[{"port": "http"}]), service("c"))
    reason = "spec.ports[0].port: Expected integer, got string"
    assert manifests.news() == [f"!a: {reason}", "-b", "+c"]
    assert not manifests.statuses
    manifests.write(service("a"), service("c"))
    assert manifests.news() == ["+a"]


def test_other_kinds_are_passed_over(
    manifests: Manifests, caplog: pytest.LogCaptureFixture
) -> None:
    """A Deployment beside its Service is fine: an info line, no warning."""
    caplog.set_level(logging.INFO)
    knative = service("knative") | {"apiVersion": "serving.knative.dev/v1"}
    manifests.write({"apiVersion": "apps/v1", "kind": "Deployment"}, knative, service("web"))
    assert manifests.services() == {"web"}
    assert {record.levelname for record in caplog.records} == {"INFO"}
    said = [message.partition(": ")[2] for message in caplog.messages]
    assert said == [
        "Deployment of apps/v1 is not used here: skipped",
        "Service of serving.knative.dev/v1 is not used here: skipped",
    ]


def test_a_list_is_its_items(manifests: Manifests) -> None:
    """``kubectl get -o yaml`` writes a list; a bad item is named by its position."""
    items = [service("a"), 5, service("b")]
    manifests.write({"apiVersion": "v1", "kind": "List", "items": items}, service("c"))
    manifests.write({"apiVersion": "v1", "kind": "List", "items": None}, name="empty.yaml")
    assert manifests.services() == {"a", "b", "c"}
    assert manifests.error() == "document 1, item 1: document: not a mapping"


def test_the_namespace_is_default_unless_said(manifests: Manifests) -> None:
    """An object without a namespace gets default, like with kubectl."""
    manifests.write("{apiVersion: v1, kind: Service, metadata: {name: a}, spec: {}}")
    ((key, found),) = manifests.first()[Kind.SERVICE].objects.items()
    assert key == Key("default", "a")
    assert isinstance(found.object, Service) and found.object.metadata.namespace == "default"


def test_null_and_empty_are_the_defaults(manifests: Manifests) -> None:
    """Fields that are null or empty get the API server's defaults, like missing fields."""
    web = service("a")
    manifests.write(web)
    usual = manifests.only_service()
    for blank in (None, ""):
        words = ("type", "sessionAffinity", "internalTrafficPolicy", "externalTrafficPolicy")
        web["spec"] |= dict.fromkeys((*words, "healthCheckNodePort", "externalIPs"), blank)
        web["spec"]["ports"][0] |= dict.fromkeys(("name", "nodePort", "protocol"), blank)
        manifests.write(web)
        assert Manifests(manifests.path).only_service() == usual


def test_an_object_said_twice_in_a_file_counts_once(
    manifests: Manifests, caplog: pytest.LogCaptureFixture
) -> None:
    """The first definition counts, and a line says so."""
    manifests.write(service("a"), service("a", clusterIP="10.96.0.2"))
    assert manifests.only_service().spec.cluster_ip == "10.96.0.1"
    assert caplog.messages == [
        f"{manifests.path}/a.yaml: Service default/a: defined twice, the first definition is used"
    ]


def test_dates_and_addresses_are_text(manifests: Manifests) -> None:
    """YAML 1.1 would read creationTimestamp as a date, and some addresses as base-60 numbers."""
    text = (
        "{apiVersion: v1, kind: Service, metadata: {name: a, creationTimestamp: %s},"
        " spec: {clusterIP: %s, ports: [{port: 0x50, nodePort: 30080}]}}"
    )
    manifests.write(text % ("2024-05-01T10:00:00Z", "2001:10:20:30:40:50:1:2"))
    service = manifests.only_service()
    assert service.metadata.creation_timestamp == "2024-05-01T10:00:00Z"
    assert service.spec.cluster_ip == "2001:10:20:30:40:50:1:2"
    assert [(port.port, port.node_port) for port in service.spec.ports] == [(80, 30080)]


def test_a_look_without_a_directory_is_an_error(manifests: Manifests) -> None:
    """The error is one line with the directory's name and the reason; the served objects stay."""
    manifests.path.rmdir()
    with pytest.raises(ClusterError, match=f"{manifests.path}: No such file"):
        manifests.folder.scan()
