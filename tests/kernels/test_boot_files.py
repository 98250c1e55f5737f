# SPDX-License-Identifier: Apache-2.0
"""What QEMU boots: the kernel out of its compressed image, and an archive the kernel unpacks."""

import lzma
import struct
import subprocess
from pathlib import Path

import pytest

from vagrant.kernels import boot_files
from vagrant.kernels.errors import LabError


def bzimage(payload: bytes, sectors: int = 3) -> bytes:
    """As the boot protocol lays it out: header, sectors of code, payload and its size."""
    head = bytearray((sectors + 1) * 512)
    head[0x1F1] = sectors
    struct.pack_into("<II", head, 0x248, 100, len(payload) + 4)
    return bytes(head) + bytes(100) + payload + struct.pack("<I", 7) + b"after"


def test_unpacked() -> None:
    """The payload is found by the header and unpacked."""
    assert boot_files.vmlinux(bzimage(lzma.compress(b"the kernel"))) == b"the kernel"


def test_packed_otherwise() -> None:
    """Another kind of packing is said, not booted."""
    with pytest.raises(LabError, match="packed in a way not known here: 1f8b08"):
        boot_files.vmlinux(bzimage(b"\x1f\x8b\x08\x00\x00\x00"))


def test_cpio(tmp_path: Path) -> None:
    """busybox's own cpio finds every file as it went in."""
    files = {"init": b"#!/bin/sh\n", "bin/busybox": b"x" * 4097}
    archive = b"".join(boot_files.cpio(files))
    assert len(archive) % 4 == 0
    if not boot_files.BUSYBOX.exists():
        pytest.skip("no busybox here")
    unpack = [str(boot_files.BUSYBOX), "cpio", "-id"]
    subprocess.run(unpack, cwd=tmp_path, input=archive, capture_output=True, check=False)
    for name, content in files.items():
        assert (tmp_path / name).read_bytes() == content
    assert (tmp_path / "init").stat().st_mode & 0o111


def test_order(tmp_path: Path) -> None:
    """A module comes after all that it depends on, and once."""
    tree = tmp_path / "lib/modules/1.0"
    tree.mkdir(parents=True)
    lines = ["fs/9p.ko.xz: net/9pnet.ko.xz fs/netfs.ko.xz", "net/9pnet.ko.xz: fs/netfs.ko.xz"]
    lines += ["net/9pnet_virtio.ko.xz: net/9pnet.ko.xz fs/netfs.ko.xz", "fs/netfs.ko.xz:"]
    (tree / "modules.dep").write_text("\n".join(lines))
    found = [path.name for path in boot_files.in_order(tmp_path)]
    assert found == ["netfs.ko.xz", "9pnet.ko.xz", "9p.ko.xz", "9pnet_virtio.ko.xz"]


def test_without_busybox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the package."""
    monkeypatch.setattr(boot_files, "BUSYBOX", tmp_path / "busybox")
    with pytest.raises(LabError, match="apt install --no-install-recommends busybox-static"):
        boot_files.prepare(tmp_path / "linux-boot_files.deb")
