# SPDX-License-Identifier: Apache-2.0
"""The watch of the configuration file (kube-proxy.md 15) reports any write, once."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpflb.config import config_file
from ebpflb.config.config_file import ConfigWatch

LONG = 20.0  # seconds, never spent where all is well
A_MOMENT = 0.3  # in which nothing may happen


class Calls:
    """A counter of the calls of ``on_change``."""

    def __init__(self) -> None:
        self.times = 0
        self.event = threading.Event()

    def __call__(self) -> None:
        self.times += 1
        self.event.set()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, "POLL_SECONDS", 0.01)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "config.conf"
    path.parent.mkdir()
    path.write_text("before")
    return path


@pytest.fixture
def begin(calls: Calls) -> Iterator[Callable[[Path], ConfigWatch]]:
    """Start watches, and stop them at the end."""
    begun: list[ConfigWatch] = []

    def start(path: Path) -> ConfigWatch:
        begun.append(ConfigWatch(path))
        begun[-1].start(calls)
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


def remove_and_make(path: Path) -> None:
    path.unlink()
    path.write_text("before")


@pytest.mark.parametrize("change", [rewrite, append, replace, remove_and_make])
def test_a_changed_file_calls_once(
    begin: Callable[[Path], ConfigWatch], calls: Calls, file: Path, change: Callable[[Path], None]
) -> None:
    """If the file is written or replaced, ``on_change`` is called once."""
    watch = begin(file)
    change(file)
    assert calls.event.wait(LONG)
    assert watch.changed
    rewrite(file)
    watch.stop()
    assert calls.times == 1


def test_config_map(begin: Callable[[Path], ConfigWatch], calls: Calls, tmp_path: Path) -> None:
    """When the kubelet swaps the link ..data of a ConfigMap, that is a change."""
    for version in ("..1", "..2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.conf").write_text(version)
    (tmp_path / "..data").symlink_to("..1")
    file = tmp_path / "config.conf"
    file.symlink_to("..data/config.conf")
    begin(file)
    (tmp_path / "..data_tmp").symlink_to("..2")
    os.rename(tmp_path / "..data_tmp", tmp_path / "..data")
    assert calls.event.wait(LONG)


def test_other_files_are_no_change(
    begin: Callable[[Path], ConfigWatch], calls: Calls, file: Path
) -> None:
    """Other files, a chmod, and a missing file do not count as a change."""
    watch = begin(file)
    (file.parent / "other.conf").write_text("x")
    file.chmod(0o600)
    file.unlink()
    assert not calls.event.wait(A_MOMENT)
    assert not watch.changed


def test_changed_before_start(calls: Calls, file: Path) -> None:
    """A change between the creation of the watch and its start is reported, because the file may
    have been read in between.
    """
    watch = ConfigWatch(file)
    rewrite(file)
    watch.start(calls)
    assert calls.event.wait(LONG)
    watch.stop()
