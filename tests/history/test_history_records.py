# SPDX-License-Identifier: Apache-2.0
"""The content of a record, and full, damaged, wrong or missing files."""

import errno
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.history import records
from ebpflb.history.records import Change, History, LatestChanges, WriteCause, latest_changes
from ebpflb.model.services import PortName
from ebpflb.options import Paths
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.planner import Planner
from tests.kit.hostile_files import HOSTILE, lay
from tests.plan.builders import by_name, desired

IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    **HOSTILE,
    "a link to a file": lambda path: path.symlink_to("/etc/passwd"),
}


class Node:
    """A planner, whose plans count as written, and its history in a directory."""

    def __init__(self, folder: Path, limit: int = records.LIMIT) -> None:
        self.paths = Paths(Path("/state"), folder)
        self.planner = Planner(Capacity(4096, 4096, 4096, 4096, 4096))
        self.now = 1000.0
        self.history = History(self.paths, limit=limit, clock=self.clock)

    def clock(self) -> float:
        self.now += 1
        return self.now

    def wants(self, *services: DesiredService, keep: bool = False) -> None:
        self.history.because(WriteCause("modified", "Service", "default/web"))
        self.plan(*services)
        self.commit(keep=keep)

    def plan(self, *services: DesiredService) -> None:
        known: dict[PortName, DesiredService | None] = dict.fromkeys(self.planner.actual)
        self.planner.plan_changes(known | by_name(*services), self.clock())

    def commit(self, *, keep: bool = False) -> None:
        changed, self.planner.changed = self.planner.changed, {}
        self.history.commit(changed, self.planner.actual, keep=keep)

    def told(self, service: tuple[str, str] | None = None, limit: int = 0) -> LatestChanges:
        return latest_changes(self.paths, service, None, limit)


def endpoints(change: Change) -> list[tuple[str, int, int, list[str], list[str]]]:
    return [
        (
            it.service,
            *(it.endpoints_before, it.endpoints_after),
            *(it.endpoints_added, it.endpoints_removed),
        )
        for it in change.services
    ]


def test_a_record_names_what_changed(tmp_path: Path) -> None:
    """A record has added and removed endpoints and frontends, and the count before and after."""
    node = Node(tmp_path)
    node.wants(desired("web", [1], [1, 2]))
    node.wants(desired("web", [1, 2], [2]))
    node.wants(desired("web", [1, 2], [2]))
    node.wants()
    first, second, third = node.told().changes
    a, b = first.services[0].endpoints_added
    web = first.services[0].service
    assert endpoints(first) == [(web, 0, 2, [a, b], [])]
    assert endpoints(second) == [(web, 2, 1, [], [a])]
    assert len(second.services[0].frontends_added) == 1
    assert endpoints(third) == [(web, 1, 0, [], [b])]
    assert len(third.services[0].frontends_removed) == 2


def test_a_record_has_the_causes_since_the_last(tmp_path: Path) -> None:
    """A record has the causes since the last one, including those whose sync came later."""
    node = Node(tmp_path)
    node.wants(keep=True)
    node.wants(desired("a", [1], [1]))
    node.plan()
    node.commit()
    causes = [change.causes for change in node.told().changes]
    assert causes == [[WriteCause("modified", "Service", "default/web")] * 2, [records.AGAIN]]


def test_a_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record names some causes, service ports and endpoints, and counts the others."""
    monkeypatch.setattr(records, "MOST_SERVICES", 3)
    monkeypatch.setattr(records, "MOST_NAMED", 2)
    node = Node(tmp_path)
    for _ in range(records.MOST_CAUSES + 10):
        node.history.because(WriteCause("modified", "Service", "default/web"))
    node.wants(*(desired(f"s{n}", [n], [1, 2, 3]) for n in range(5)))
    (change,) = node.told().changes
    assert (len(change.causes), change.more_causes) == (records.MOST_CAUSES, 11)
    assert (len(change.services), change.more_services) == (3, 2)
    assert [(it.endpoints_after, len(it.endpoints_added)) for it in change.services] == [(3, 2)] * 3


def test_of_one_service(tmp_path: Path) -> None:
    """Other Services are left out, and earlier changes of this Service are counted."""
    node = Node(tmp_path)
    for count in (1, 2, 3):
        node.wants(desired("web", [1], [1, 2, 3][:count]), desired("b", [2], [1, 2, 3][:count]))
    found = node.told(("shop", "b"), limit=2)
    assert found.earlier == 1
    assert [len(change.services) for change in found.changes] == [1, 1]
    services = {it.service for change in found.changes for it in change.services}
    assert services == {"shop/b/TCP"}


def test_two_files_are_kept(tmp_path: Path) -> None:
    """Two files are within the limit, and hold the newest records without a gap."""
    node = Node(tmp_path, limit=4096)
    for _ in range(100):
        node.history.start()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4096
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    times = [change.time for change in node.told().changes]
    wanted = [records.moment(1001.0 + number) for number in range(100)]
    assert len(times) > 10 and times == wanted[-len(times) :]


def test_damaged_lines_are_named(tmp_path: Path) -> None:
    """Invalid lines, and half a line at the end, are named; the others are read."""
    node = Node(tmp_path)
    node.history.start()
    with node.paths.history_file.open("ab") as file:
        file.write(b'damaged\n{"time":"then","causes":[]}\n' + b"[" * 99_999 + b"\n")
    node.history.start()
    with node.paths.history_file.open("ab") as file:
        file.write(b'{"time":')
    found = node.told()
    assert len(found.changes) == 2
    assert [note.split(" is damaged")[0].split()[-1] for note in found.notes] == list("2346")


@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_what_lies_in_its_place(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the agent nor a reader waits for a wrong file or follows a link; the file is
    named.
    """
    node = Node(tmp_path)
    node.history.start()
    os.replace(node.paths.history_file, tmp_path / "state.history.1")
    lay(IN_THE_WAY[kind], node.paths.history_file)
    node.history.start()
    notes, logged = node.told().notes, caplog.messages
    assert notes or logged or len(node.told().changes) == 2
    assert node.told().changes[0].causes[0].event == "started"


def test_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent goes on without a history, logs this once, and records again when there is
    space.
    """
    node, real = Node(tmp_path), os.write
    node.history.start()
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        for _ in range(3):
            node.history.start()
    assert caplog.text.count(os.strerror(errno.ENOSPC)) == 1
    node.history.start()
    found = node.told()
    assert (len(found.changes), found.notes) == (2, [])
