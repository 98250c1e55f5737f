# SPDX-License-Identifier: Apache-2.0
"""The files of a directory: new, changed, removed, renamed, defined twice, or of other kinds."""

from pathlib import Path

import pytest

from ebpflb.model.events import Changed, Key, Kind, Removed, Replaced
from tests.cluster.event_log import EventLog, Start
from tests.cluster.manifest_files import begun, keys, write
from tests.cluster.objects import HEADLESS, PROXY_NAME, endpoint_slice, node, service

WEB = Key("default", "web")


def test_every_kind_is_told_once_even_if_there_is_nothing(events: EventLog, follow: Start) -> None:
    """Nothing is programmed before every list is complete, so an empty list must be emitted too."""
    follow()
    assert begun(events) == {kind: Replaced(kind, {}) for kind in Kind}


def test_other_files_are_not_read(
    folder: Path, events: EventLog, follow: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Hidden files, other suffixes, folders and dangling links are not manifests."""
    write(folder / ".hidden.yaml", service("hidden"))
    write(folder / "notes.txt", service("notes"))
    (folder / "folder.yaml").mkdir()
    (folder / "dangling.yaml").symlink_to("nowhere")
    follow()
    assert events.next(Kind.SERVICE) == Replaced(Kind.SERVICE, {})
    assert caplog.messages == []


def test_only_what_changed_is_told(folder: Path, events: EventLog, follow: Start) -> None:
    """If one of three objects in a changed file differs and one is gone, there are two events."""
    write(folder / "a.yaml", service("same"), service("gone"), service("other"))
    follow()
    begun(events)
    write(folder / "a.yaml", service("same"), service("other", clusterIP="10.96.0.9"))
    assert events.next(Kind.SERVICE) == Removed(Kind.SERVICE, Key("default", "gone"))
    event = events.next(Kind.SERVICE)
    assert (event.key.name, event.found.object.spec.cluster_ip) == ("other", "10.96.0.9")
    write(folder / "b.yaml", service("mark"))
    assert events.next(Kind.SERVICE).key.name == "mark"


def test_a_renamed_file_moves_its_objects(folder: Path, events: EventLog, follow: Start) -> None:
    """The object is not removed in between; only its origin changes."""
    write(folder / "a.yaml", service("web"))
    follow()
    begun(events)
    (folder / "a.yaml").rename(folder / "z.yaml")
    event = events.next(Kind.SERVICE)
    if isinstance(event, Removed):  # the two halves of a rename may be seen one by one
        event = events.next(Kind.SERVICE)
    assert event.found.source == "z.yaml"


def test_objects_that_do_not_concern_us_are_not_told(
    folder: Path, events: EventLog, follow: Start
) -> None:
    """The API's selectors are applied to manifests too: labels by presence, clusterIP None, other
    nodes.
    """
    write(
        folder / "a.yaml",
        service("foreign", labels={PROXY_NAME: ""}),
        service("headless", clusterIP="None"),
        service("ours"),
        endpoint_slice("headless", labels={HEADLESS: ""}),
        endpoint_slice("foreign", labels={PROXY_NAME: "x"}),
        node("node-1"),
        node("node-2"),
    )
    follow()
    found = begun(events)
    assert keys(found[Kind.SERVICE]) == {"default/ours"}
    assert keys(found[Kind.ENDPOINT_SLICE]) == {"default/foreign"}
    assert keys(found[Kind.NODE]) == {"node-1"}


def test_an_object_that_stops_matching_is_removed(
    folder: Path, events: EventLog, follow: Start
) -> None:
    """An object that stops matching is removed, and emitted again when it matches again."""
    write(folder / "a.yaml", service("web"))
    follow()
    begun(events)
    write(folder / "a.yaml", service("web", labels={PROXY_NAME: "other"}))
    assert events.next(Kind.SERVICE) == Removed(Kind.SERVICE, WEB)
    write(folder / "a.yaml", service("web"))
    assert isinstance(events.next(Kind.SERVICE), Changed)


def test_of_two_files_the_first_by_name_counts(
    folder: Path, events: EventLog, follow: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """If two files define an object, a line says so; when the first file is removed, the second one
    counts.
    """
    write(folder / "b.yaml", service("web", clusterIP="10.96.0.2"))
    write(folder / "a.yaml", service("web", clusterIP="10.96.0.1"))
    follow()
    assert begun(events)[Kind.SERVICE].objects[WEB].source == "a.yaml"
    assert caplog.messages == [
        "Service default/web: also in a.yaml and b.yaml: the first file is used"
    ]
    (folder / "a.yaml").unlink()
    assert events.next(Kind.SERVICE).found.object.spec.cluster_ip == "10.96.0.2"
