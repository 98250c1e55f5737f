# SPDX-License-Identifier: Apache-2.0
"""What others remove is told at once, without looking for it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest

from ebpflb.kernel.node.device_watch import RemovalWatch
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run
from tests.kernel.variants import eventually
from tests.kit.descriptors import beyond_1023

NAME = f"ebpflb-test-{os.getpid()}-removals"
Told = SimpleQueue[None]


@contextmanager
def watching(*folders: Path, released: Path | None = None) -> Iterator[Told]:
    told: Told = SimpleQueue()
    watch = RemovalWatch(lambda: told.put(None), folders, lambda pin: pin == released)
    watch.start()
    try:
        yield told
    finally:
        watch.stop()


@pytest.mark.parametrize(
    "removal",
    [
        ("qdisc", "del", "dev", "lo", "clsact"),
        ("filter", "del", "dev", "lo", "ingress"),
    ],
    ids=["qdisc", "filter"],
)
def test_a_qdisc_or_filter_that_is_removed_is_told(removal: tuple[str, ...]) -> None:
    """Of whatever device; what is added is not."""
    with nodes.fresh(NAME), watching() as told:
        run("tc", "qdisc", "add", "dev", "lo", "clsact")
        run("tc", "filter", "add", "dev", "lo", "ingress", "bpf", "bytecode", "1,6 0 0 0,")
        with pytest.raises(Empty):
            told.get(timeout=0.2)
        run("tc", *removal)
        told.get(timeout=60)


def removed_pin(folder: Path) -> None:
    (folder / "pin").unlink()


def moved_pin(folder: Path) -> None:
    (folder / "pin").rename(folder.parent / "pin")


def removed_folder(folder: Path) -> None:
    (folder / "pin").unlink()
    folder.rmdir()


@pytest.mark.parametrize("remove", [removed_pin, moved_pin, removed_folder])
def test_a_name_that_is_removed_is_told(tmp_path: Path, remove: Callable[[Path], None]) -> None:
    """From a folder of the state directory, or the folder itself."""
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "pin").touch()
    with watching(folder) as told:
        (folder / "more").touch()
        (folder / "more").unlink()
        told.get(timeout=60)
        remove(folder)
        told.get(timeout=60)


def test_a_pin_that_the_agent_removes_itself_is_not_told(tmp_path: Path) -> None:
    """Those of a device's programs, when the device is gone."""
    ours, other = tmp_path / "5-ingress", tmp_path / "6-ingress"
    ours.touch()
    other.touch()
    with watching(tmp_path, released=ours) as told:
        ours.unlink()
        with pytest.raises(Empty):
            told.get(timeout=0.2)
        other.unlink()
        told.get(timeout=60)


def test_a_folder_that_is_made_anew_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a bpffs has been mounted anew."""
    monkeypatch.setattr("ebpflb.kernel.node.device_watch.WATCH_RETRY_SECONDS", 0.01)
    folder = tmp_path / "links"
    with watching(folder) as told:
        folder.mkdir()

        def is_told() -> bool:
            (folder / "pin").touch()
            (folder / "pin").unlink()
            return not told.empty()

        assert eventually(is_told)


def test_with_many_open_files(tmp_path: Path) -> None:
    """An agent on a node with some 480 devices has descriptors beyond 1,023."""
    (tmp_path / "pin").touch()
    with beyond_1023(), watching(tmp_path) as told:
        (tmp_path / "pin").unlink()
        told.get(timeout=60)
