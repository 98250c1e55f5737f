# SPDX-License-Identifier: Apache-2.0
"""The past content of the maps is read from the files, whatever happened in between."""

import tempfile
import zlib
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.errors import NodeError
from ebpflb.history import segments
from ebpflb.history.changes import latest_changes
from ebpflb.history.past import Past, State
from ebpflb.history.segments import Entries, WriteCause
from ebpflb.plan.entries import Backend
from tests.history.fakes import Node


def backend(number: int) -> Backend:
    return Backend(IPv4Address(number), number, frozenset({"cluster"}), number, 1)


def held(state: State) -> dict[str, dict[bytes, bytes]]:
    return {name: each.packed for name, each in state.maps.items() if each.packed}


STEPS = some.lists(
    some.one_of(
        some.tuples(some.just("write"), some.sets(some.integers(1, 9), min_size=1)),
        some.tuples(some.just("delete"), some.sets(some.integers(1, 9), min_size=1)),
        some.tuples(some.just("slots"), some.sets(some.integers(0, 9), min_size=1)),
        some.tuples(some.sampled_from(["restart", "crash", "fail", "full"]), some.just(set())),
    ),
    max_size=12,
)


def step(node: Node, what: str, numbers: set[int]) -> None:
    names, slots, history = node.maps["backend_slots"], node.maps["slots"], node.history
    match what:
        case "write":
            names.write([(number, number) for number in numbers])
        case "delete":
            node.maps["cluster_ips"].write([(IPv4Address(n), 1) for n in numbers])
            node.maps["cluster_ips"].delete([IPv4Address(n) for n in numbers])
        case "slots":
            slots.write([(number, backend(number)) for number in numbers])
        case "restart" | "crash":
            node.history.stop() if what == "restart" else node.crash()
            node.start()
        case "fail":
            history.commit(error="a write has failed")
            slots.packed[slots.key.pack(1)] = slots.value.pack(backend(7))  # as nobody has told
        case "full":
            history.full_at = 0
    node.history.commit()
    node.checkpoint()


@given(STEPS)
def test_every_time(steps: list[tuple[str, set[int]]]) -> None:
    """At the end of each step the history holds what the maps held."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder))
        moments = [(node.clock(), node.contents())]
        for what, numbers in steps:
            step(node, what, numbers)
            moments.append((node.clock(), node.contents()))
        node.history.stop()
        past = Past(node.paths)
        for at, contents in moments:
            assert held(past.at(at)) == contents


def gone_through(past: Past, latest: int | None = None) -> list[tuple[float, Any]]:
    """The time of each sync, and the maps after it."""
    found = []
    for state, sync in past.syncs(latest):
        state.apply(sync.writes)
        found.append((sync.at, {name: dict(packed) for name, packed in held(state).items()}))
    return found


@given(STEPS, some.integers(1, 9))
def test_the_latest_alone(steps: list[tuple[str, set[int]]], number: int) -> None:
    """They are the same without the files before them, whatever happened in between."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder))
        for what, numbers in steps:
            step(node, what, numbers)
        node.history.stop()
        past = Past(node.paths)
        every = gone_through(past)
        assert past.times == [at for at, _ in every]
        assert gone_through(past, number)[-number:] == every[-number:]
        changes = latest_changes(node.paths, None, None, 0)
        shown = latest_changes(node.paths, None, None, number)
        assert shown.changes == changes.changes[-number:]
        assert shown.earlier == len(changes.changes) - len(shown.changes)
        since = every[-number:][0][0] if every else 0
        assert latest_changes(node.paths, None, since, 0).changes == shown.changes


def test_files_before_the_latest_are_left_alone(tmp_path: Path) -> None:
    """A long history takes no longer than a short one."""
    node = Node(tmp_path)
    step(node, "write", {1})
    step(node, "full", set())
    step(node, "write", {2})
    step(node, "write", {3})
    node.history.stop()
    past = Past(node.paths)
    past.files[0] = past.files[0]._replace(entries=[Entries("slots", b"not", b"compressed")])
    assert [at for at, _ in gone_through(past, 1)][-1] == past.times[-1]
    with pytest.raises(zlib.error):
        gone_through(past)


def test_before_it_begins(tmp_path: Path) -> None:
    """The error says when the history begins."""
    node = Node(tmp_path)
    node.history.stop()
    with pytest.raises(NodeError, match="history begins at 1970-01-01"):
        Past(node.paths).at(1.0)


@pytest.mark.parametrize("restarts", [False, True])
def test_after_the_clock_was_set_back(tmp_path: Path, restarts: bool) -> None:
    """A time that comes twice is the later one; what was written before it is never left out."""
    node = Node(tmp_path)
    names, moments = node.maps["backend_slots"], []
    for number in range(1, 9):
        names.write([(number, number)])
        node.history.commit()
        moments.append((node.clock(), node.contents()))
        if number == 4:
            node.clock.now -= 500
            moments.clear()
            if restarts:
                node.history.stop()
                node.start()
    node.history.stop()
    past = Past(node.paths)
    for at, contents in moments:
        assert held(past.at(at)) == contents
    assert held(past.at(2000.0)) == node.contents()


def test_bounded(tmp_path: Path) -> None:
    """The files stay below the limit; what is lost is the oldest, and the beginning says so."""
    limit = 64 << 10
    node = Node(tmp_path, limit=limit)
    begins = Past(node.paths).begins or 0
    for number in range(2000):
        node.maps["backend_slots"].write([(number % 9, number)])
        node.history.because(WriteCause("modified", "Service", "default/web", str(number)))
        node.history.commit()
        node.checkpoint()
    node.history.stop()
    sizes = [path.stat().st_size for path in segments.paths_of(node.paths)]
    assert sum(sizes) <= limit + limit // segments.PARTS
    past = Past(node.paths)
    assert (past.begins or 0) > begins
    assert held(past.at(node.clock())) == node.contents()
    with pytest.raises(NodeError, match="history begins at"):
        past.at(begins)


def test_a_large_checkpoint_is_followed_by_as_many_records_as_a_small_one(tmp_path: Path) -> None:
    """Else many Services would mean a checkpoint of all of them for every few changes."""
    limit = 16 << 10
    node = Node(tmp_path, limit=limit)
    names = node.maps["backend_slots"]
    names.write([(number, number * 7919) for number in range(10_000)])
    node.history.full_at = 0
    node.history.commit()  # the next file begins, with a checkpoint of them
    node.checkpoint()
    begun = segments.paths_of(node.paths)[-1]
    checkpoint = begun.stat().st_size
    assert checkpoint > limit
    while segments.paths_of(node.paths)[-1] == begun:
        size = begun.stat().st_size
        names.write([(1, 1)])
        node.history.commit()
    assert size - checkpoint > limit // segments.PARTS - 250  # less than the last record


def test_after_damage(tmp_path: Path) -> None:
    """It is named; times before it, and after the next checkpoint, hold what the maps held."""
    node = Node(tmp_path)
    names, moments = node.maps["backend_slots"], []
    for number in (1, 2, 3):
        names.write([(number, number)])
        node.history.commit()
        moments.append((node.clock(), node.contents()))
    (path,) = segments.paths_of(node.paths)
    *lines, _ = path.read_bytes().splitlines(keepends=True)
    node.history.full_at = 0
    node.history.commit()
    node.checkpoint()
    path.write_bytes(b"".join([*lines, b"damaged\n"]))
    names.write([(4, 4)])
    node.history.commit()
    moments.append((node.clock(), node.contents()))
    node.history.stop()
    past = Past(node.paths)
    assert [f"{path}: line {len(lines) + 1} is damaged" in note for note in past.notes] == [True]
    (before, *_, after) = moments
    for at, contents in (before, after):
        assert held(past.at(at)) == contents


def test_other_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of another version are named, and later ones are read."""
    with monkeypatch.context() as before:
        before.setattr("ebpflb.kernel.maps.layout.layout_hash", lambda: "another")
        Node(tmp_path).history.stop()
    node = Node(tmp_path)
    node.maps["backend_slots"].write([(1, 1)])
    node.history.stop()
    past = Past(node.paths)
    assert "has other layouts" in past.notes[0]
    assert held(past.at(node.clock())) == node.contents()


def test_half_a_record(tmp_path: Path) -> None:
    """A crash in the middle of a write costs that record; the next agent goes on."""
    node = Node(tmp_path)
    node.maps["backend_slots"].write([(1, 1)])
    node.history.commit()
    at, contents = node.clock(), node.contents()
    node.maps["backend_slots"].write([(2, 2)])
    node.crash()
    (path,) = segments.paths_of(node.paths)
    with path.open("ab") as file:
        file.write(b"\x10\0\0\0half")
    node.start()
    node.history.stop()
    past = Past(node.paths)
    assert held(past.at(at)) == contents
    assert held(past.at(node.clock())) == node.contents()


def named(causes: list[WriteCause]) -> list[Any]:
    return [(each.event, each.name) for each in causes]


def test_causes(tmp_path: Path) -> None:
    """A record has the causes since the last one, also those whose sync came later."""
    node = Node(tmp_path)
    node.history.commit()
    node.history.because(WriteCause("modified", "Service", "default/a"))
    node.history.commit(keep=True)
    node.history.because(WriteCause("deleted", "Service", "default/b"))
    node.maps["backend_slots"].write([(1, 1)])
    node.history.commit()
    node.history.because(WriteCause("modified", "Service", "default/nothing-of-it-counts"))
    node.history.commit()
    node.maps["backend_slots"].write([(2, 2)])
    node.history.commit()
    node.history.stop()
    first, second = (sync for _, sync in Past(node.paths).syncs())
    assert named(first.causes) == [("modified", "default/a"), ("deleted", "default/b")]
    assert named(second.causes) == [("again", "")]


def test_many_causes(tmp_path: Path) -> None:
    """Fifty are named, and the others counted."""
    node = Node(tmp_path)
    node.history.commit()
    for number in range(70):
        node.history.because(WriteCause("modified", "Service", f"default/{number}"))
    node.maps["backend_slots"].write([(1, 1)])
    node.history.stop()
    ((_, sync),) = Past(node.paths).syncs()
    assert (len(sync.causes), sync.more) == (50, 20)
