# SPDX-License-Identifier: Apache-2.0
"""Every declared option is read, so it has an effect."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import ebpflb
from ebpflb.options import Flag, Options, Paths, flags_of

PACKAGE = Path(ebpflb.__file__).parent
DECLARATIONS = PACKAGE / "options.py"
PASSES_ON = PACKAGE / "serve" / "status.py"  # publishes options, and reads them again
READERS = [it for it in PACKAGE.rglob("*.py") if it not in (DECLARATIONS, PASSES_ON)]


def attributes(tree: ast.AST, *owners: str) -> Iterator[str]:
    """Return the attributes of values with one of these names, like ``self.options.audit``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
            if owner in owners:
                yield node.attr


def unread(kind: type, declarations: ast.AST, readers: Iterable[ast.AST], owner: str) -> list[str]:
    """Yield the fields of the dataclass that nothing reads, directly or by a property."""
    used = {name for tree in readers for name in attributes(tree, owner)}
    (declared,) = (
        node
        for node in ast.walk(declarations)
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    for _ in declared.body:  # a property may read another one
        for each in declared.body:
            if isinstance(each, ast.FunctionDef) and each.name in used:
                used |= set(attributes(each, "self"))
    return [each.name for each in fields(kind) if each.name not in used]


@pytest.mark.parametrize(("kind", "owner"), [(Options, "options"), (Paths, "paths")])
def test_every_option_is_read(kind: type, owner: str) -> None:
    """The agent or a command reads every option."""
    readers = [ast.parse(path.read_text()) for path in READERS]
    assert unread(kind, ast.parse(DECLARATIONS.read_text()), readers, owner) == []


def test_an_option_that_nothing_reads_is_found() -> None:
    """An unread option is found, even if another object has an attribute of the same name."""
    declarations = ast.parse(
        "class Paths:\n  @property\n  def status_file(self): return self.run\n"
        "  @property\n  def unused(self): return self.cache"
    )
    reader = ast.parse("paths.status_file, other.cache, self._paths.state, paths.known_as")
    assert unread(Paths, declarations, [reader], "paths") == ["cache"]


def flags() -> list[Flag]:
    return [flag for kind in (Options, Paths) for _, flag, _ in flags_of(kind)]


def test_each_option_has_a_name() -> None:
    """Each option has a name; an option for a directory also has an environment variable."""
    names = [flag.name for flag in flags()]
    assert len(set(names)) == len(names)
    assert {flag.variable for flag in flags() if flag.variable} == {
        "EBPFLB_STATE_DIR",
        "EBPFLB_RUN_DIR",
        "EBPFLB_CACHE_DIR",
        "EBPFLB_CGROUP_ROOT",
        "EBPFLB_MANIFESTS",
    }
