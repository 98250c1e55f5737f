# SPDX-License-Identifier: Apache-2.0
"""A bad file of a directory does not affect other files, or lose its own last good state."""

import json
import os
import tempfile
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as some

from ebpflb import files
from ebpflb.cluster.manifests import ManifestDirectory
from ebpflb.errors import LONGEST_LINE
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Event, Kind, Removed, Replaced, SourceStatus
from ebpflb.serve import status
from tests.cluster.objects import service
from tests.load import scaled

GOOD = "good.yaml"
BEFORE = yaml.safe_dump(service("before"))


CONTENTS = {
    "!!bool": "a: !!bool foo",
    "!!int": "a: !!int foo",
    "!!float": "a: !!float foo",
    "!!timestamp": "a: !!timestamp foo",
    "!!binary": "a: !!binary é",
    "!!python": "a: !!python/object/apply:os.system [true]",
    "a float too large": "a: 1" + ":1" * 500 + ".0",
    "an int too long": "a: " + "9" * 10**5,
    "unhashable": "? {a: b}\n: c",
    "not unicode": "a: \udcff\udcfe",
    "a line without end": "a: " + "b" * 10**6 + ": c",
    "a name without end": f"apiVersion: v1\nkind: Service\nmetadata: {{name: {'n' * 10**6}}}",
    "a name of two lines": 'apiVersion: v1\nkind: Service\nmetadata: {name: "a\\nb"}',
    "a namespace that is a list": "apiVersion: v1\nkind: Service\n"
    "metadata: {name: a, namespace: [b]}",
    "two colons": "a: b: c",
    "a directive": "%",
    "a key without a value": "? [a]\n: b",
    "an open mapping": "{",
    "a null character": "\0",
    "digits": "9" * 10**6,
    "braces in braces": '{"a":' * 10**5 + "1" + "}" * 10**5,
    "lists in lists": "- " * 10**5 + "a",
}


class Watched:
    """A directory with two files, one good, one that was good and is now bad."""

    def __init__(self, path: Path, bad: str = "bad.yaml") -> None:
        self.path, self.bad = path, path / bad
        self.directory = ManifestDirectory(path, "node-1", settled_after=0)
        (path / GOOD).write_text(yaml.safe_dump(service("good")))
        self.bad.write_text(json.dumps(service("before")))
        assert self.services(self.directory.scan()) == {"good", "before"}
        self.bad.unlink()

    def services(self, events: list[Event]) -> set[str]:
        """Return the Services' names; the events are also processed as in an agent."""
        state = ClusterState("node-1")
        for event in events:
            if not isinstance(event, SourceStatus):
                for warning in state.apply(event).warnings:
                    assert_short(str(warning))
        (replaced,) = (e for e in events if isinstance(e, Replaced) and e.kind is Kind.SERVICE)
        return {key.name for key in replaced.objects}

    def error(self) -> str:
        """Return the error of the bad file.

        Its former object stays, and the other file is served.
        """
        (path := self.path / GOOD).write_text(yaml.safe_dump(service("renamed")))
        assert path.exists()
        events = self.directory.scan()
        changes = [e for e in events if not isinstance(e, SourceStatus)]
        assert {(type(e), e.key.name) for e in changes if isinstance(e, Changed | Removed)} == {
            (Changed, "renamed"),
            (Removed, "good"),
        }
        (said,) = (e for e in events if isinstance(e, SourceStatus))
        assert said.error is not None
        assert_short(said.error)
        return said.error


def assert_short(line: str) -> None:
    assert "\n" not in line
    assert line.isprintable()
    assert len(line) < LONGEST_LINE + 200
    line.encode()


@pytest.fixture
def watched(folder: Path) -> Watched:
    return Watched(folder)


@pytest.mark.parametrize("name", ["bad.yaml", "bad.json"])
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_bad_content_is_kept_to_its_file(folder: Path, name: str, content: str) -> None:
    """Whatever the parser raises, the file's former objects stay, and one line names the file."""
    watched = Watched(folder, name)
    watched.bad.write_bytes(content.encode(errors="surrogateescape"))
    watched.error()


def test_only_regular_files_of_bounded_size_are_read(watched: Watched) -> None:
    """A file of another kind is named; a good file in its place is read again."""
    os.mkfifo(watched.bad)
    watched.error()
    watched.bad.unlink()
    watched.bad.write_text(yaml.safe_dump(service("after")))
    changes = [e for e in watched.directory.scan() if isinstance(e, Changed | Removed)]
    assert {(type(e), e.key.name) for e in changes} == {(Changed, "after"), (Removed, "before")}


def test_a_file_without_a_size_is_read_to_the_limit(tmp_path: Path) -> None:
    """A file without a size, as in /proc, or a file that grows is read up to the limit."""
    assert files.read_regular(Path("/proc/self/status"))
    (tmp_path / "file").write_bytes(b"123")
    assert files.read_regular(tmp_path / "file", 3) == b"123"
    with pytest.raises(files.UnusableFile, match="larger than"):
        files.read_regular(Path("/proc/self/status"), 10)


@pytest.mark.parametrize("name", [b"\xff\xfe.yaml", b"a\nb\x1b[31m.yaml"])
def test_an_unprintable_file_name_can_be_said(folder: Path, name: bytes, tmp_path: Path) -> None:
    """The file's name can be written to the log, to the status and as an object's origin.

    Other files are served.
    """
    (folder / GOOD).write_text(yaml.safe_dump(service("good")))
    (folder / os.fsdecode(name)).write_text(yaml.safe_dump(service("odd")) + "---\n5")
    events = ManifestDirectory(folder, "node-1").scan()
    (said,) = (event for event in events if isinstance(event, SourceStatus))
    assert_short(said.source)
    (replaced,) = (e for e in events if isinstance(e, Replaced) and e.kind is Kind.SERVICE)
    assert {key.name for key in replaced.objects} == {"good", "odd"}
    for found in replaced.objects.values():
        assert_short(found.source)
    shown = status.initial(node="node-1", source=said.source)
    msgspec.json.encode(shown.changed(source_errors={said.source: str(said.error)}))


fragments = some.sampled_from(
    ["&a ", "*a", "<<: ", "{", "}", "[", "]", ": ", "- ", "? ", "\n", "---\n", "!!bool ", "!!set ",
     "!!timestamp ", "!!omap ", "!!pairs ", "kind: ", "Service", "apiVersion: v1", "metadata: ",
     "name: ", "spec: ", "ports: ", "items: ", "List", "1:1.0", "0x", "'", '"', "|", ">", "%YAML ",
     "2001-01-01", "~", ", ", "  ", "\t", "\ufeff", "é", BEFORE]
)  # fmt: skip
yamlish = some.lists(fragments, max_size=60).map(lambda parts: "".join(parts).encode())


@given(
    content=some.one_of(
        some.binary(max_size=400), yamlish, yamlish.map(lambda data: BEFORE.encode() + data)
    ),
    suffix=some.sampled_from([".yaml", ".json"]),
)
@example(content=b"apiVersion: v1\nkind: Service\nmetadata: {name: &a [*a]}", suffix=".yaml")
@settings(deadline=None, max_examples=scaled(500))
def test_any_bytes_as_content(content: bytes, suffix: str) -> None:
    """No content ends the reader: a good file beside the bad one is served, and the messages are
    short.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / f"bad{suffix}").write_bytes(content)
        (folder / GOOD).write_text(yaml.safe_dump(service("the-good-one")))
        events = ManifestDirectory(folder, "node-1").scan()
        state = ClusterState("node-1")
        for event in events:
            if isinstance(event, SourceStatus):
                assert_short(event.error or "\n")
            else:
                for warning in state.apply(event).warnings:
                    assert_short(str(warning))
        (replaced,) = (e for e in events if isinstance(e, Replaced) and e.kind is Kind.SERVICE)
        assert "the-good-one" in {key.name for key in replaced.objects}
