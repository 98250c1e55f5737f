# SPDX-License-Identifier: Apache-2.0
"""The directory followed by inotify: half-written files, swapped links, removal and restoration."""

import errno
import os
import threading
from pathlib import Path

import pytest
import yaml

from ebpflb import files as regular_file
from ebpflb.cluster import manifests
from ebpflb.cluster.manifests import ManifestDirectory, ManifestSource
from ebpflb.errors import ClusterError
from ebpflb.model.events import Changed, Event, Key, Kind, Removed, Replaced, Together
from tests.cluster.event_log import NODE, QUICK, Begin, EventLog, Quick, Start
from tests.cluster.manifest_files import begun, keys, look_at_everything, write
from tests.cluster.objects import endpoint_slice, service
from tests.kit.api_server import WAIT_SECONDS

WEB = Key("default", "web")
SERVICE = Kind.SERVICE


def test_a_file_written_in_place_is_told_when_it_is_closed(
    folder: Path, events: EventLog, follow: Start
) -> None:
    """A file is not read when it is created, because half a file may be invalid, or lack
    objects.
    """
    follow()
    begun(events)
    with (folder / "a.yaml").open("w") as file:
        file.write(yaml.safe_dump(service("web")))
        file.flush()
        look_at_everything(folder)
        write(folder / "b.yaml", service("mark"))
        assert events.next(Kind.SERVICE).key.name == "mark"
        file.write(f"---\n{yaml.safe_dump(service('second'))}")
    assert [events.next(Kind.SERVICE).key.name for _ in range(2)] == ["second", "web"]


class BlockedLog(EventLog):
    """A log that takes no event while ``blocked``, so the source's thread does not read inotify."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()
        self.waits = threading.Event()

    def __call__(self, event: Event | Together) -> None:
        if not self.free.is_set():
            self.waits.set()
            self.free.wait(WAIT_SECONDS)
        super().__call__(event)


def overflow(folder: Path) -> None:
    """Cause more events than inotify's queue holds; events of hidden files are ignored."""
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    names = [str(folder / f".{number}") for number in range(2)]  # equal neighbours are one event
    for number in range(most):
        os.close(os.open(names[number % 2], os.O_WRONLY | os.O_CREAT))


def test_what_changed_while_inotify_lost_events_is_read(
    folder: Path, begin: Begin, quick: Quick, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is read that was written, or completed, while events were lost."""
    write(folder / "a.yaml", service("web"))
    events = BlockedLog()
    timing = quick(rescan_interval=1000)
    begin(ManifestSource(events, directory=folder, node_name=NODE, timing=timing))
    begun(events)
    with (folder / "b.yaml").open("w") as file:
        file.flush()
        write(folder / "c.yaml", service("mark"))
        assert events.next(Kind.SERVICE).key.name == "mark"
        events.free.clear()
        write(folder / "a.yaml", service("web", clusterIP="10.96.0.8"))
        assert events.waits.wait(WAIT_SECONDS)
        overflow(folder)
        file.write(yaml.safe_dump(service("late")))
    write(folder / "d.yaml", service("later"))
    events.free.set()
    found = [events.next(Kind.SERVICE).key.name for _ in range(3)]
    assert found[0] == "web" and sorted(found[1:]) == ["late", "later"]
    assert "inotify lost events" in caplog.text


def test_a_scan_leaves_a_file_that_has_just_changed_for_the_next_one(folder: Path) -> None:
    """A file may still be open for writing unnoticed: a link's target, or any file after inotify
    has lost events.
    """
    (folder / "a.yaml").write_text(yaml.safe_dump_all([service("first"), service("second")]))
    directory = ManifestDirectory(folder, NODE, settled_after=1000)
    (services,) = (it for it in directory.scan() if isinstance(it, Replaced) and it.kind is SERVICE)
    assert len(services.objects) == 2
    (folder / "a.yaml").write_text(yaml.safe_dump(service("first")))
    assert directory.scan() == [] and directory.skipped
    os.utime(folder / "a.yaml", (0, 0))
    assert directory.scan() == [Removed(SERVICE, Key("default", "second"))]
    assert not directory.skipped


def test_a_hard_link_is_read(folder: Path, events: EventLog, follow: Start) -> None:
    """A new hard link is read, although no one ever closes it."""
    write(folder.parent / "elsewhere", service("web"))
    follow()
    begun(events)
    (folder / "a.yaml").hardlink_to(folder.parent / "elsewhere")
    assert events.next(Kind.SERVICE).key == WEB


def test_a_config_map_swap_is_followed(folder: Path, events: EventLog, follow: Start) -> None:
    """The links stay, ``..data`` is swapped below them, and only what differs is emitted."""

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
    assert keys(begun(events)[Kind.SERVICE]) == {"default/web", "default/same"}
    publish("2", web="10.96.0.3", same="10.96.0.2", new="10.96.0.4")
    (folder / "new.yaml").symlink_to("..data/new.yaml")
    found = [events.next(Kind.SERVICE).found for _ in range(2)]
    assert {it.object.spec.cluster_ip for it in found} == {"10.96.0.3", "10.96.0.4"}


def test_a_link_whose_target_is_edited_is_found_by_the_next_look(
    folder: Path, events: EventLog, follow: Start, quick: Quick
) -> None:
    """inotify on the directory does not see the edit; a scan every ``rescan_interval`` does."""
    target = folder.parent / "elsewhere"
    target.write_text(yaml.safe_dump(service("web")))
    (folder / "a.yaml").symlink_to(target)
    follow(quick(rescan_interval=0.1))
    begun(events)
    target.write_text(yaml.safe_dump(service("other")))
    assert {type(events.next(Kind.SERVICE)) for _ in range(2)} == {Changed, Removed}


def test_unchanged_files_are_not_parsed_again(
    folder: Path, events: EventLog, follow: Start, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan reads no unchanged file.

    The scan may find the new file before inotify reports it, so that file may be read twice.
    """
    for name in "abc":
        write(folder / f"{name}.yaml", service(name))
    follow(quick(rescan_interval=600))
    begun(events)
    parsed = []
    read = regular_file.read_regular

    def read_and_note(path: Path) -> bytes:
        parsed.append(path.name)
        return read(path)

    monkeypatch.setattr(regular_file, "read_regular", read_and_note)
    write(folder / "b.yaml", service("b", clusterIP="10.96.0.9"))
    events.next(Kind.SERVICE)
    look_at_everything(folder)
    write(folder / "d.yaml", service("d"))
    events.next(Kind.SERVICE)
    assert parsed[0] == "b.yaml"
    assert set(parsed[1:]) == {"d.yaml"}


def test_no_directory_is_an_error_at_start(folder: Path, events: EventLog) -> None:
    """The error comes at once, in one line with the directory's name; a file is not a directory
    either.
    """
    (folder / "file").touch()
    for path in (folder / "none", folder / "file"):
        with pytest.raises(ClusterError, match=str(path)):
            ManifestSource(events, directory=path, node_name="node-1").start()


def test_a_directory_that_vanishes_is_an_error_and_is_found_again(
    folder: Path, events: EventLog, follow: Start
) -> None:
    """While the directory is away nothing is removed; afterwards only differences are emitted."""
    write(folder / "a.yaml", service("web"))
    follow()
    begun(events)
    folder.rename(folder.parent / "away")
    status = events.source_status()
    assert status.source == str(folder)
    assert "No such file" in str(status.error)
    write(folder.parent / "away" / "b.yaml", service("new"))
    (folder.parent / "away").rename(folder)
    assert events.source_status() == type(status)(str(folder), None)
    assert events.next(Kind.SERVICE).key.name == "new"
    write(folder / "c.yaml", service("watched-again"))
    assert events.next(Kind.SERVICE).key.name == "watched-again"


def test_a_directory_replaced_at_once_is_followed(
    folder: Path, events: EventLog, follow: Start
) -> None:
    """The watch was on the old directory; objects of the new one are emitted and followed."""
    write(folder / "a.yaml", service("web"))
    follow()
    begun(events)
    new = folder.parent / "new"
    new.mkdir()
    write(new / "a.yaml", service("web", clusterIP="10.96.0.2"))
    folder.rename(folder.parent / "old")
    new.rename(folder)
    assert events.next(Kind.SERVICE).found.object.spec.cluster_ip == "10.96.0.2"
    write(folder / "b.yaml", service("more"))
    assert events.next(Kind.SERVICE).key.name == "more"


def test_without_inotify_the_directory_is_looked_at_by_the_second(
    folder: Path, events: EventLog, follow: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes may run out of inotify instances; that is an error, but manifests are still read, every
    second.
    """

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(manifests, "INotify", refuse)
    write(folder / "a.yaml", service("web"))
    follow()
    assert keys(events.next(Kind.SERVICE)) == {"default/web"}
    assert "fs.inotify.max_user_instances" in events.error()
    write(folder / "b.yaml", service("new"))
    assert events.next(Kind.SERVICE).key.name == "new"


def test_stop_is_prompt_and_final(folder: Path, events: EventLog, follow: Start) -> None:
    """The thread ends at once and emits nothing any more."""
    before = threading.enumerate()
    source = follow()
    begun(events)
    source.stop()
    assert threading.enumerate() == before
    write(folder / "a.yaml", service("late"))
    assert events.all() == []


def test_one_write_of_a_file_is_one_change(begin: Begin, folder: Path) -> None:
    """A Service and its slice, whose port is renamed, are emitted together, so one plan has both
    changes.
    """
    received, told = list[Event | Together](), threading.Event()

    def take(event: Event | Together) -> None:
        received.append(event)
        told.set()

    file = folder / "a.yaml"
    labels = {"kubernetes.io/service-name": "a"}
    file.write_text(yaml.safe_dump_all([service("a"), endpoint_slice("a", labels=labels)]))
    begin(ManifestSource(take, directory=folder, node_name=NODE, timing=QUICK))
    assert told.wait(WAIT_SECONDS)
    received.clear()
    told.clear()
    renamed = [service("a"), endpoint_slice("a", labels=labels)]
    renamed[0]["spec"]["ports"][0]["name"] = renamed[1]["ports"][0]["name"] = "renamed"
    file.write_text(yaml.safe_dump_all(renamed))
    assert told.wait(WAIT_SECONDS)
    (change,) = received
    assert isinstance(change, Together)
    assert sorted(each.kind for each in change.events if isinstance(each, Changed)) == [
        Kind.ENDPOINT_SLICE,
        Kind.SERVICE,
    ]
