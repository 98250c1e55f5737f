# SPDX-License-Identifier: Apache-2.0
"""Bytecode of an installation needs no compiler, and no other bytecode is loaded.

In these tests BCC is missing and the cache is empty, unless a test says otherwise.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.errors import CompileError
from ebpflb.kernel import bpf, datapath
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs import compiler, precompile
from ebpflb.kernel.programs.compiler import compile_source
from ebpflb.tools import node_checks
from tests.kernel.variants import needs_root
from tests.kit import once

SOURCE = "hooks/packet.c"
FLAGS = precompile.VARIANTS[SOURCE]["coarse clock"]
EVERY = [(source, flags) for source, its in precompile.VARIANTS.items() for flags in its.values()]


@pytest.fixture(scope="module")
def made(shared: Path, cache: Path) -> Path:
    """Make the bytecode as the image's recipe does, with this machine's BCC."""
    folder = shared / "brought"
    with once.alone(shared):
        precompile.write(folder, cache)
    return folder


@pytest.fixture
def brought(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a copy of the precompiled bytecode, on a machine without BCC."""
    copy = Path(shutil.copytree(made, tmp_path / "brought"))
    monkeypatch.setattr(compiler, "BROUGHT", copy)
    monkeypatch.setattr(compiler, "bcc_version", lambda: None)
    return copy


def place(brought: Path) -> Path:
    return compiler.entry(brought, SOURCE, FLAGS, compiler.ANY_BCC)


@pytest.mark.parametrize(("source", "flags"), EVERY)
def test_no_variant_needs_a_compiler(
    brought: Path, tmp_path: Path, source: str, flags: tuple[str, ...]
) -> None:
    """Every program of every variant is precompiled, and nothing is written to the cache."""
    found = compile_source(source, flags, cache=tmp_path / "cache")
    assert found.cached
    assert found.programs.keys() == compiler.sections(source).keys()
    assert not (tmp_path / "cache").exists()


@needs_root
def test_an_agent_starts_without_a_compiler(brought: Path, home: StateDir, tmp_path: Path) -> None:
    """The agent loads the variant for this kernel."""
    opened = datapath.Datapath(home)
    try:
        assert not opened.load(tmp_path / "cache")
        assert opened.programs
    finally:
        opened.close()


def others_may_write(entry: Path) -> None:
    entry.chmod(0o666)


def cut_off(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:1000])


def another_variant(entry: Path) -> None:
    other = compiler.entry(entry.parent, SOURCE, (), compiler.ANY_BCC)
    shutil.copy(other, entry)


def somebody_elses(entry: Path) -> None:
    os.chown(entry, 65534, 65534)


@pytest.mark.parametrize(
    "damage",
    [others_may_write, cut_off, another_variant, pytest.param(somebody_elses, marks=needs_root)],
)
def test_what_cannot_be_trusted_is_not_loaded(
    brought: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """The cache's rules apply; the sources are compiled instead, which fails in this test."""
    damage(place(brought))
    with pytest.raises(CompileError, match="BCC is missing"):
        compile_source(SOURCE, FLAGS, cache=tmp_path)
    assert not precompile.is_brought()


def test_what_is_not_there_is_compiled(
    brought: Path, cache: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BCC compiles missing bytecode into the cache."""
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "BROUGHT", brought)
    flags = ("-DNOT_BROUGHT",)
    with once.alone(shared):
        assert not compile_source("hooks/netns_cookie.c", flags, cache=brought / "cache").cached
    assert compile_source("hooks/netns_cookie.c", flags, cache=brought / "cache").cached


def test_it_holds_what_is_needed_and_nothing_else(made: Path, cache: Path) -> None:
    """A second precompilation removes files of former sources."""
    (made / f"{'a' * 64}.msgpack").touch()
    (made / f"{'a' * 64}.py").touch()
    precompile.write(made, cache)
    tables = {bpf.write_declarations(text, made) for text in (bpf.TEXT, layout.TEXT)}
    variants = {compiler.entry(made, *it, compiler.ANY_BCC) for it in EVERY}
    assert {*made.iterdir()} == variants | tables


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, cache: Path) -> None:
    """An unwritable folder is an error, so no image is made without bytecode by mistake."""
    (tmp_path / "file").touch()
    with pytest.raises(CompileError, match=r"file/brought/\w+\.msgpack cannot be written"):
        precompile.write(tmp_path / "file" / "brought", cache)


def test_check_asks_for_bcc_only_where_bytecode_is_missing(brought: Path) -> None:
    """A node that runs the image has no BCC, and does not need it."""
    assert node_checks.bcc_requirement().ok
    place(brought).unlink()
    assert node_checks.bcc_requirement().result == node_checks.WRONG
