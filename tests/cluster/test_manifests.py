# SPDX-License-Identifier: Apache-2.0
"""A directory followed by inotify: files written, renamed, removed, swapped, gone and back."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebpflb.cluster.manifests import ManifestSource
from ebpflb.errors import ClusterError
from ebpflb.model.events import Changed, Event, Key, Kind, Removed, Replaced
from tests.cluster.fake_api import Json
from tests.cluster.heard import Heard, Quick, Start
from tests.cluster.objects import HEADLESS, PROXY_NAME, endpoint_slice, node, service

WEB = Key("default", "web")


def write(path: Path, *documents: Json) -> None:
    """As an editor should: under a hidden name, then renamed."""
    hidden = path.with_name(f".{path.name}.new")
    hidden.write_text(yaml.safe_dump_all(documents))
    hidden.rename(path)


def look_at_everything(folder: Path) -> None:
    """An event that names no manifest."""
    (folder / "..data").mkdir()


def begun(heard: Heard) -> dict[Kind, Any]:
    """The Replaced of each kind."""
    return {kind: heard.of(kind) for kind in Kind}


def keys(event: Event) -> set[str]:
    assert isinstance(event, Replaced)
    return {str(key) for key in event.objects}


def test_every_kind_is_told_once_even_if_there_is_nothing(heard: Heard, follow: Start) -> None:
    """Nothing is programmed before every list is complete, so an empty list must be told too."""
    follow()
    assert begun(heard) == {kind: Replaced(kind, {}) for kind in Kind}


def test_objects_arrive_with_their_file(folder: Path, heard: Heard, follow: Start) -> None:
    """Several documents per file, several files, each object with the file's name."""
    write(folder / "a.yaml", service("web"), endpoint_slice("web-1", "10.0.0.1"), node("node-1"))
    write(folder / "b.yml", service("api", namespace="shop"))
    (folder / "c.json").write_text(json.dumps(service("json")))
    follow()
    found = begun(heard)
    assert keys(found[Kind.SERVICE]) == {"default/web", "shop/api", "default/json"}
    assert keys(found[Kind.ENDPOINT_SLICE]) == {"default/web-1"}
    assert keys(found[Kind.NODE]) == {"node-1"}
    sources = {key.name: it.source for key, it in found[Kind.SERVICE].objects.items()}
    assert sources == {"web": "a.yaml", "api": "b.yml", "json": "c.json"}


def test_other_files_are_not_read(
    folder: Path, heard: Heard, follow: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Hidden files, other suffixes, folders, pipes and dangling links are no manifests."""
    write(folder / ".hidden.yaml", service("hidden"))
    write(folder / "notes.txt", service("notes"))
    (folder / "folder.yaml").mkdir()
    (folder / "dangling.yaml").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.yaml")
    follow()
    assert heard.of(Kind.SERVICE) == Replaced(Kind.SERVICE, {})
    assert caplog.messages == []


def test_a_new_file_is_told(folder: Path, heard: Heard, follow: Start) -> None:
    """Its objects become Changed."""
    follow()
    begun(heard)
    write(folder / "a.yaml", service("web"))
    assert heard.of(Kind.SERVICE).key == WEB


def test_a_file_written_in_place_is_told_when_it_is_closed(
    folder: Path, heard: Heard, follow: Start
) -> None:
    """CREATE alone is not yet a reason to read: half a file would be no YAML, or less of it."""
    follow()
    begun(heard)
    with (folder / "a.yaml").open("w") as file:
        file.write(yaml.safe_dump(service("web")))
        file.flush()
        look_at_everything(folder)
        write(folder / "b.yaml", service("mark"))
        assert heard.of(Kind.SERVICE).key.name == "mark"
        file.write(f"---\n{yaml.safe_dump(service('second'))}")
    assert [heard.of(Kind.SERVICE).key.name for _ in range(2)] == ["second", "web"]


def test_a_file_rewritten_in_place_is_not_read_by_half(
    folder: Path, heard: Heard, follow: Start
) -> None:
    """Truncated and not yet written to the end: what it said before is not removed."""
    write(folder / "a.yaml", service("first"), service("second"))
    follow()
    begun(heard)
    with (folder / "a.yaml").open("w") as file:
        file.write(yaml.safe_dump(service("first")))
        file.flush()
        look_at_everything(folder)
        write(folder / "b.yaml", service("mark"))
        assert heard.of(Kind.SERVICE).key.name == "mark"
        file.write(f"---\n{yaml.safe_dump(service('second', clusterIP='10.96.0.9'))}")
    event = heard.of(Kind.SERVICE)
    assert (type(event), event.key.name) == (Changed, "second")


def test_only_what_changed_is_told(folder: Path, heard: Heard, follow: Start) -> None:
    """Of three objects in a changed file one differs, one is gone, and one gives no event."""
    write(folder / "a.yaml", service("same"), service("gone"), service("other"))
    follow()
    begun(heard)
    write(folder / "a.yaml", service("same"), service("other", clusterIP="10.96.0.9"))
    assert heard.of(Kind.SERVICE) == Removed(Kind.SERVICE, Key("default", "gone"))
    event = heard.of(Kind.SERVICE)
    assert (event.key.name, event.found.object.spec.cluster_ip) == ("other", "10.96.0.9")
    write(folder / "b.yaml", service("mark"))
    assert heard.of(Kind.SERVICE).key.name == "mark"


def test_fields_that_nobody_reads_give_no_event(folder: Path, heard: Heard, follow: Start) -> None:
    """A new targetPort or annotation leaves the object equal."""
    write(folder / "a.yaml", service("web"))
    follow()
    begun(heard)
    write(folder / "a.yaml", service("web", ports=[{"port": 80, "targetPort": "http"}]))
    write(folder / "b.yaml", service("mark"))
    assert heard.of(Kind.SERVICE).key.name == "mark"


def test_a_removed_file_removes_its_objects(folder: Path, heard: Heard, follow: Start) -> None:
    """Unlinked, or moved out of the directory."""
    write(folder / "a.yaml", service("a"))
    write(folder / "b.yaml", service("b"))
    follow()
    begun(heard)
    (folder / "a.yaml").unlink()
    assert heard.of(Kind.SERVICE) == Removed(Kind.SERVICE, Key("default", "a"))
    (folder / "b.yaml").rename(folder.parent / "b.yaml")
    assert heard.of(Kind.SERVICE) == Removed(Kind.SERVICE, Key("default", "b"))


def test_a_renamed_file_moves_its_objects(folder: Path, heard: Heard, follow: Start) -> None:
    """The object is not removed in between, only found elsewhere."""
    write(folder / "a.yaml", service("web"))
    follow()
    begun(heard)
    (folder / "a.yaml").rename(folder / "z.yaml")
    event = heard.of(Kind.SERVICE)
    if isinstance(event, Removed):  # the two halves of a rename may be seen one by one
        event = heard.of(Kind.SERVICE)
    assert event.found.source == "z.yaml"


def test_a_config_map_swap_is_followed(folder: Path, heard: Heard, follow: Start) -> None:
    """The links stay, ``..data`` is swapped below them, and only what differs is told."""

    def publish(version: str, **ips: str) -> None:
        (folder / f"..{version}").mkdir()
        for name, ip in ips.items():
            path = folder / f"..{version}" / f"{name}.yaml"
            path.write_text(yaml.safe_dump(service(name, clusterIP=ip)))
        (folder / "..data_tmp").symlink_to(f"..{version}")
        (folder / "..data_tmp").rename(folder / "..data")

    publish("1", web="10.96.0.1", same="10.96.0.2")
    for name in ("web", "same"):
        (folder / f"{name}.yaml").symlink_to(f"..data/{name}.yaml")
    follow()
    assert keys(begun(heard)[Kind.SERVICE]) == {"default/web", "default/same"}
    publish("2", web="10.96.0.3", same="10.96.0.2", new="10.96.0.4")
    (folder / "new.yaml").symlink_to("..data/new.yaml")
    told = [heard.of(Kind.SERVICE).found for _ in range(2)]
    assert {it.object.spec.cluster_ip for it in told} == {"10.96.0.3", "10.96.0.4"}


def test_a_link_whose_target_is_edited_is_found_by_the_next_look(
    folder: Path, heard: Heard, follow: Start, quick: Quick
) -> None:
    """inotify on the directory does not see it; a look every ``Pace.rescan`` does."""
    target = folder.parent / "elsewhere"
    target.write_text(yaml.safe_dump(service("web")))
    (folder / "a.yaml").symlink_to(target)
    follow(quick(rescan=0.1))
    begun(heard)
    target.write_text(yaml.safe_dump(service("other")))
    assert {type(heard.of(Kind.SERVICE)) for _ in range(2)} == {Changed, Removed}


def test_objects_that_do_not_concern_us_are_not_told(
    folder: Path, heard: Heard, follow: Start
) -> None:
    """The API's selectors are applied here: labels by presence, clusterIP None, other nodes."""
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
    found = begun(heard)
    assert keys(found[Kind.SERVICE]) == {"default/ours"}
    assert keys(found[Kind.ENDPOINT_SLICE]) == {"default/foreign"}
    assert keys(found[Kind.NODE]) == {"node-1"}


def test_an_object_that_stops_matching_is_removed(
    folder: Path, heard: Heard, follow: Start
) -> None:
    """And told again when it begins to match."""
    write(folder / "a.yaml", service("web"))
    follow()
    begun(heard)
    write(folder / "a.yaml", service("web", labels={PROXY_NAME: "other"}))
    assert heard.of(Kind.SERVICE) == Removed(Kind.SERVICE, WEB)
    write(folder / "a.yaml", service("web"))
    assert isinstance(heard.of(Kind.SERVICE), Changed)


def test_of_two_files_the_first_by_name_counts(
    folder: Path, heard: Heard, follow: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A line says so, and when the first one goes the second one takes over."""
    write(folder / "b.yaml", service("web", clusterIP="10.96.0.2"))
    write(folder / "a.yaml", service("web", clusterIP="10.96.0.1"))
    follow()
    assert begun(heard)[Kind.SERVICE].objects[WEB].source == "a.yaml"
    assert caplog.messages == ["Service default/web: in a.yaml and b.yaml: the first one counts"]
    (folder / "a.yaml").unlink()
    assert heard.of(Kind.SERVICE).found.object.spec.cluster_ip == "10.96.0.2"


def test_unchanged_files_are_not_parsed_again(
    folder: Path, heard: Heard, follow: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the changed one is."""
    for name in "abc":
        write(folder / f"{name}.yaml", service(name))
    follow()
    begun(heard)
    parsed = []
    read = Path.read_bytes

    def read_and_note(path: Path) -> bytes:
        parsed.append(path.name)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_and_note)
    write(folder / "b.yaml", service("b", clusterIP="10.96.0.9"))
    heard.of(Kind.SERVICE)
    look_at_everything(folder)
    write(folder / "d.yaml", service("d"))
    heard.of(Kind.SERVICE)
    assert parsed == ["b.yaml", "d.yaml"]


def test_no_directory_is_an_error_at_start(folder: Path, heard: Heard) -> None:
    """The operator is told at once, in one line that names it; a file is no directory either."""
    (folder / "file").touch()
    for path in (folder / "none", folder / "file"):
        with pytest.raises(ClusterError, match=str(path)):
            ManifestSource(heard, directory=path, node_name="node-1").start()


def test_a_directory_that_vanishes_is_trouble_and_is_found_again(
    folder: Path, heard: Heard, follow: Start
) -> None:
    """Nothing is removed while it is away; when it is back, only what differs is told."""
    write(folder / "a.yaml", service("web"))
    follow()
    begun(heard)
    folder.rename(folder.parent / "away")
    trouble = heard.trouble()
    assert trouble.source == str(folder)
    assert "No such file" in str(trouble.reason)
    write(folder.parent / "away" / "b.yaml", service("new"))
    (folder.parent / "away").rename(folder)
    assert heard.trouble() == type(trouble)(str(folder), None)
    assert heard.of(Kind.SERVICE).key.name == "new"
    write(folder / "c.yaml", service("watched-again"))
    assert heard.of(Kind.SERVICE).key.name == "watched-again"


def test_a_directory_replaced_at_once_is_followed(
    folder: Path, heard: Heard, follow: Start
) -> None:
    """The watch was on the old one; what the new one says is told, and followed."""
    write(folder / "a.yaml", service("web"))
    follow()
    begun(heard)
    new = folder.parent / "new"
    new.mkdir()
    write(new / "a.yaml", service("web", clusterIP="10.96.0.2"))
    folder.rename(folder.parent / "old")
    new.rename(folder)
    assert heard.of(Kind.SERVICE).found.object.spec.cluster_ip == "10.96.0.2"
    write(folder / "b.yaml", service("more"))
    assert heard.of(Kind.SERVICE).key.name == "more"


def test_stop_is_prompt_and_final(folder: Path, heard: Heard, follow: Start) -> None:
    """The thread ends within a second and tells nothing any more."""
    source = follow()
    begun(heard)
    start = time.monotonic()
    source.stop()
    assert time.monotonic() - start < 1
    write(folder / "a.yaml", service("late"))
    assert heard.everything() == []
