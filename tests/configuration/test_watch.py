# SPDX-License-Identifier: Apache-2.0
"""The configuration file under watch (kube-proxy.md 15): any write or rename is told, once."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpflb.configuration import watch as watching
from ebpflb.configuration.watch import ConfigWatch

LONG = 20.0  # seconds, never spent where all is well
A_MOMENT = 0.3  # in which nothing may happen


class Told:
    """How often it was told."""

    def __init__(self) -> None:
        self.times = 0
        self.event = threading.Event()

    def __call__(self) -> None:
        self.times += 1
        self.event.set()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "config.conf"
    path.parent.mkdir()
    path.write_text("before")
    return path


@pytest.fixture
def begin(told: Told) -> Iterator[Callable[[Path], ConfigWatch]]:
    """Starts watches, and stops them."""
    begun: list[ConfigWatch] = []

    def start(path: Path) -> ConfigWatch:
        begun.append(ConfigWatch(path))
        begun[-1].start(told)
        return begun[-1]

    yield start
    for each in begun:
        each.stop()


def rewrite(path: Path) -> None:
    path.write_text("after")


def append(path: Path) -> None:
    with path.open("a") as half:
        half.write("x")
        half.flush()


def replace(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_text("before")
    new.replace(path)


def move_away(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


def remove_and_make(path: Path) -> None:
    path.unlink()
    path.write_text("before")


@pytest.mark.parametrize("change", [rewrite, append, replace, move_away, remove_and_make])
def test_changed(
    begin: Callable[[Path], ConfigWatch], told: Told, file: Path, change: Callable[[Path], None]
) -> None:
    """Written, replaced or renamed: it is told once."""
    watch = begin(file)
    change(file)
    assert told.event.wait(LONG)
    assert watch.changed
    rewrite(file)
    watch._thread.join(LONG)
    assert told.times == 1


def test_config_map(begin: Callable[[Path], ConfigWatch], told: Told, tmp_path: Path) -> None:
    """The kubelet swaps the link ..data of a ConfigMap: that is a change."""
    for version in ("..1", "..2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.conf").write_text(version)
    (tmp_path / "..data").symlink_to("..1")
    file = tmp_path / "config.conf"
    file.symlink_to("..data/config.conf")
    begin(file)
    (tmp_path / "..data_tmp").symlink_to("..2")
    os.rename(tmp_path / "..data_tmp", tmp_path / "..data")
    assert told.event.wait(LONG)


def test_link_elsewhere(begin: Callable[[Path], ConfigWatch], told: Told, file: Path) -> None:
    """A write to the file that a link leads to is a change."""
    link = file.parent.parent / "link.conf"
    link.symlink_to(file)
    begin(link)
    rewrite(file)
    assert told.event.wait(LONG)


def test_others(begin: Callable[[Path], ConfigWatch], told: Told, file: Path) -> None:
    """Files beside it, a chmod, and a file that is gone are no change."""
    watch = begin(file)
    (file.parent / "other.conf").write_text("x")
    file.chmod(0o600)
    file.unlink()
    assert not told.event.wait(A_MOMENT)
    assert not watch.changed


def test_changed_before_start(told: Told, file: Path) -> None:
    """What changes between the making of the watch and its start is told: the file may have been
    read in between.
    """
    watch = ConfigWatch(file)
    rewrite(file)
    watch.start(told)
    assert told.event.wait(LONG)
    watch.stop()


def test_without_inotify(
    told: Told, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where inotify has no more room the file is looked at every now and then."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(watching, "INotify", refuse)
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.01)
    watch = ConfigWatch(file)
    watch.start(told)
    rewrite(file)
    assert told.event.wait(LONG)
    watch.stop()
    assert f"{file}: no inotify, polling every 0.01 s instead: Too many open files" in caplog.text


def test_stopped(told: Told, file: Path) -> None:
    """A stopped watch tells nothing, and one that never began can be stopped."""
    watch = ConfigWatch(file)
    watch.start(told)
    watch.stop()
    rewrite(file)
    assert not told.event.wait(A_MOMENT)
    ConfigWatch(file).stop()
