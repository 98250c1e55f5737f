# SPDX-License-Identifier: Apache-2.0
"""An arm64 kernel gets a root of its own, with the checkout as it is now."""

import subprocess
from pathlib import Path

import pytest

from vagrant.kernels import arm64, machine
from vagrant.kernels.errors import LabError


def test_what_is_brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as they are, committed or not, but not what git ignores; and the bytecode."""
    checkout, root = tmp_path / "checkout", tmp_path / "root"
    (checkout / "folder").mkdir(parents=True)
    monkeypatch.chdir(checkout)
    for name in ("folder/kept", "removed", "new", "ignored"):
        Path(name).write_text(name)
    Path(".gitignore").write_text("ignored\n")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "folder", "removed"], check=True)
    Path("removed").unlink()
    (tmp_path / "bytecode").mkdir()
    (tmp_path / "bytecode/program").touch()
    for _ in range(2):  # what a former run brought is gone
        arm64.bring(root, tmp_path / "bytecode")
        inside = root / "ebpflb"
        found = {str(it.relative_to(inside)) for it in inside.rglob("*") if it.is_file()}
        assert found == {".gitignore", "folder/kept", "new", "bytecode/program"}
        (inside / "former").touch()


def test_an_archive_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what failed, and no half of a root."""
    program = tmp_path / "mmdebstrap"
    program.write_text("#!/bin/sh\necho 'W: first' >&2; echo 'E: no network' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(arm64, "tool", lambda *_: str(program))
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(LabError, match=r"mmdebstrap failed: E: no network$"):
        arm64.root(cache)
    assert not list(cache.iterdir())


def test_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """QEMU emulates the machine of the image's root, which is this one's if it has none."""
    monkeypatch.setattr(machine, "tool", lambda name, _: name)
    monkeypatch.setattr(machine, "acceleration", lambda: ())
    assert {machine.QEMU, "local,id=root,path=/,security_model=none,readonly=on"} <= {
        word.replace(",multidevs=remap", "") for word in machine.qemu_command(tmp_path, tmp_path)
    }
    (tmp_path / "programs").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "programs")
    words = machine.qemu_command(tmp_path, tmp_path)
    assert machine.ARM64 in words and machine.QEMU not in words
    assert any(f"path={tmp_path}/programs," in word for word in words)
    assert machine.checkout(tmp_path) == "/ebpflb"
