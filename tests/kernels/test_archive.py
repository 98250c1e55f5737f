# SPDX-License-Identifier: Apache-2.0
"""Kernels from Debian's archive: looked up, signed, and one line where it is out of reach."""

import shutil
from pathlib import Path

import pytest

from vagrant.kernels import archive, errors
from vagrant.kernels.errors import LabError
from vagrant.kernels.listing import Kernel

AWAY = Kernel("5.10", "bullseye-security", "http://127.0.0.1:9/debian-security")
apt = pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt")


def test_abi_is_looked_up() -> None:
    """The number in the package's name is what the empty package depends on today."""
    said = "linux-image-amd64\n  Depends: linux-image-5.10.0-46-amd64\n  Conflicts: x\n"
    assert archive.image_package(said) == "linux-image-5.10.0-46-amd64"
    with pytest.raises(LabError, match="depends on no image"):
        archive.image_package("linux-image-amd64\n")


@apt
def test_out_of_reach(tmp_path: Path) -> None:
    """Without network: one line that names the archive."""
    with pytest.raises(LabError) as refusal:
        archive.fetch(AWAY, tmp_path)
    first, *more = str(refusal.value).splitlines()
    assert first.startswith("the kernel cannot be fetched from http://127.0.0.1:9/debian-security")
    assert not more


@apt
def test_fetched_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without network the package that is here will do, and it is said."""
    kept = tmp_path / "linux-image-5.10.0-1-amd64_5.10_amd64.deb"
    kept.touch()
    assert archive.fetch(AWAY, tmp_path) == kept
    assert "going on with linux-image-5.10.0-1" in capsys.readouterr().err


@apt
def test_unsigned(tmp_path: Path) -> None:
    """An archive that Debian did not sign is refused."""
    suite = tmp_path / "archive" / "dists" / "mine" / "main" / "binary-amd64"
    suite.mkdir(parents=True)
    (suite / "Packages").touch()
    (suite.parents[1] / "Release").write_text("Suite: mine\nComponents: main\n")
    (tmp_path / "cache").mkdir()
    kernel = Kernel("mine", "mine", f"file:{tmp_path}/archive")
    with pytest.raises(LabError, match=r"is not signed"):
        archive.fetch(kernel, tmp_path / "cache")


@apt
def test_own_folder(tmp_path: Path) -> None:
    """The machine's own lists and sources are not touched: everything is in our folder."""
    before = sorted(Path("/var/lib/apt/lists").iterdir())
    with pytest.raises(LabError):
        archive.fetch(AWAY, tmp_path)
    assert sorted(Path("/var/lib/apt/lists").iterdir()) == before
    sources = (tmp_path / "apt" / "sources.list").read_text()
    assert f"signed-by={archive.KEYRING}" in sources
    assert sources.count("\n") == 1


def test_missing_tool() -> None:
    """A tool that is not there: one line with the package that has it."""
    with pytest.raises(LabError, match=r"^no-such is missing: apt install \S+ some-package$"):
        errors.tool("no-such", "some-package")
