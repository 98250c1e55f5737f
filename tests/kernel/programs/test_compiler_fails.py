# SPDX-License-Identifier: Apache-2.0
"""If nothing can be compiled, the error names the reason and no files are left."""

import sys
from pathlib import Path

import pytest

from ebpflb.errors import CompileError
from ebpflb.kernel.programs import compiler
from ebpflb.kernel.programs.compiler import compile_source
from tests.kernel.variants import SOURCE

pytestmark = pytest.mark.usefixtures("nothing_brought")


def test_no_bcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without BCC the error names its package."""
    monkeypatch.setitem(sys.modules, "bcc", None)
    with pytest.raises(CompileError, match="apt install python3-bpfcc"):
        compile_source(SOURCE, cache=tmp_path)


@pytest.mark.parametrize(
    ("child", "complaint"),
    [
        ("#!/nowhere", "No such file or directory"),
        ("#!/bin/sh\nexec sleep 60", "not ended after"),
        ("#!/bin/sh\nprintf half", "Expected `object`"),
    ],
    ids=["no-process", "endless", "no-bytecode"],
)
def test_child_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, complaint: str
) -> None:
    """A child that cannot start, does not end or crashes is a CompileError with the reason.

    Loaded programs keep serving.
    """
    program = tmp_path / "child"
    program.write_text(child)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.5)
    with pytest.raises(CompileError, match=complaint):
        compile_source(SOURCE, cache=tmp_path / "cache")


def test_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's copy of the sources is removed after it has compiled or failed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CompileError):
        compile_source(SOURCE, cache=tmp_path / "cache")
    assert not list(tmp_path.iterdir())
