# SPDX-License-Identifier: Apache-2.0
"""A package -> what QEMU boots: an uncompressed kernel, an initramfs, and the modules' tree.

<cache>/5.10/linux-image-*.deb     as Debian made it
<cache>/5.10/image-<hash>/         of that package and of the files here that make it:
    vmlinux                        booted directly (PVH), 5 s sooner than the compressed one
    initramfs                      busybox, init, and the modules that reach the 9p root
    lib/modules/<release>/         the rest, loaded when the kernel asks for it
"""

import hashlib
import lzma
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from vagrant.kernels.errors import LabError, need, tool

HERE = Path(__file__).parent
BUSYBOX = Path("/bin/busybox")
BOOT_MODULES = ("virtio_pci", "9p", "9pnet_virtio", "overlay")
# What is unpacked of the package: the kernel, and the modules that a network lab can ask for.
PARTS = (
    "./boot/vmlinuz-*",
    "*/modules.*",
    *(f"*/kernel/{name}/*" for name in ("net", "lib", "crypto", "drivers/virtio")),
    *(f"*/kernel/fs/{name}/*" for name in ("9p", "fscache", "netfs", "overlayfs")),
    *(f"*/kernel/fs/{name}/*" for name in ("lockd", "nfs", "nfs_common")),
    *(f"*/kernel/drivers/net/{name}*" for name in ("veth", "dummy", "tun", "macvlan", "ifb")),
    *(f"*/kernel/drivers/net/{name}*" for name in ("vxlan", "ipvlan", "geneve", "vrf")),
    *(f"*/kernel/drivers/net/{name}/*" for name in ("bonding", "wireguard")),
    "*/kernel/arch/*/crypto/*",  # of WireGuard
)
_ZSTD, _XZ = b"\x28\xb5\x2f\xfd", b"\xfd7zXZ"


def prepare(package: Path, root: Path | None = None) -> Path:
    """The folder that is booted; made once for each package.

    ``root`` has the programs for a kernel that cannot run this machine's (arm64.py); the folder has
    a link to it then.
    """
    busybox = root / "bin/busybox" if root else need(BUSYBOX, "busybox-static")
    made = package.parent / f"image-{_fingerprint(package, root, busybox)}"
    if made.is_dir():
        return made
    half = made.with_suffix(f".{os.getpid()}")
    try:
        _unpack(package, half)
        image = next(half.glob("boot/vmlinuz-*")).read_bytes()
        (half / "vmlinux").write_bytes(image if root else vmlinux(image))  # arm64's is not packed
        shutil.rmtree(half / "boot")
        _initramfs(half, Path("/") if root else made, busybox)
        if root:
            shutil.rmtree(root / "lib/modules", ignore_errors=True)
            shutil.copytree(half / "lib/modules", root / "lib/modules")
            (half / "root").symlink_to(root)
        for old in package.parent.glob("image-????????????"):
            shutil.rmtree(old, ignore_errors=True)
        half.rename(made)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return made


def _fingerprint(package: Path, root: Path | None, busybox: Path) -> str:
    digest = hashlib.sha256(f"{package.name} {package.stat().st_size} {root or ''}".encode())
    for part in (Path(__file__), HERE / "init", busybox):
        digest.update(part.read_bytes())
    return digest.hexdigest()[:12]


def _unpack(package: Path, folder: Path) -> None:
    tool("xz", "xz-utils")
    tool("zstd", "zstd")
    folder.mkdir(parents=True)
    tar = ["tar", "-x", "--no-same-owner", "-C", str(folder), "--wildcards"]
    tar += ["--transform=s,^\\./usr/lib/,./lib/,"]
    archive = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
    subprocess.run([*tar, *PARTS], stdin=archive.stdout, stderr=subprocess.PIPE, check=False)
    if archive.wait() or not any(folder.glob("boot/vmlinuz-*")):
        raise LabError(f"{package} holds no kernel: delete it, and it is fetched anew")
    depmod = [tool("depmod", "kmod"), "-b", str(folder), release(folder)]
    subprocess.run(depmod, capture_output=True, check=True)


def release(folder: Path) -> str:
    """Return the kernel's own name, such as 5.10.0-46-amd64."""
    return next(folder.glob("lib/modules/*")).name


def vmlinux(image: bytes) -> bytes:
    """Return the kernel inside a compressed one, at the header's offset (x86 boot protocol)."""
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    packed = image[start : start + length - 4]  # its last four bytes are the unpacked size
    if packed.startswith(_XZ):
        return lzma.LZMADecompressor().decompress(packed)
    if packed.startswith(_ZSTD):
        unzip = [tool("zstd", "zstd"), "-dc"]
        return subprocess.run(unzip, input=packed, capture_output=True, check=True).stdout
    raise LabError(f"the kernel is packed in a way not known here: {packed[:6].hex()}")


def _initramfs(folder: Path, tree: Path, busybox: Path) -> None:
    """Pack busybox, init, a modprobe for the unpacked tree, and the modules to reach it."""
    modprobe = f'#!/bin/busybox sh\nexec busybox chroot /mnt /sbin/modprobe -d {tree} "$@"\n'
    files = {
        "init": (HERE / "init").read_bytes(),
        "bin/busybox": busybox.read_bytes(),
        "sbin/modprobe": modprobe.encode(),
    }
    names = []
    for path in in_order(folder):
        names.append(path.name.split(".")[0] + ".ko")
        files[f"modules/{names[-1]}"] = _unpacked(path)
    files["modules/order"] = "\n".join(names).encode()
    (folder / "initramfs").write_bytes(b"".join(cpio(files)))


def in_order(folder: Path) -> list[Path]:
    """Return the modules that are needed to boot, each after its dependencies."""
    tree = folder / "lib/modules" / release(folder)
    lines = (tree / "modules.dep").read_text().splitlines()
    depends = {one: needs.split() for one, needs in (line.split(":", 1) for line in lines)}
    by_name = {Path(path).name.split(".")[0]: path for path in depends}
    order: dict[str, None] = {}
    for path in (by_name[name] for name in BOOT_MODULES if name in by_name):
        order |= dict.fromkeys([*reversed(depends[path]), path])
    return [tree / path for path in order]


def _unpacked(module: Path) -> bytes:
    return lzma.decompress(module.read_bytes()) if module.suffix == ".xz" else module.read_bytes()


def cpio(files: dict[str, bytes]) -> Iterator[bytes]:
    """Return the archive that the kernel unpacks (newc), with a console."""
    folders = ("bin", "dev", "host", "memory", "mnt", "modules", "proc", "sbin")
    entries: list[tuple[str, int, bytes]] = [(name, stat.S_IFDIR | 0o755, b"") for name in folders]
    entries.append(("dev/console", stat.S_IFCHR | 0o600, b""))
    entries += [(name, stat.S_IFREG | 0o755, content) for name, content in files.items()]
    entries.append(("TRAILER!!!", 0, b""))
    for number, (name, mode, content) in enumerate(entries, start=1):
        device = (5, 1) if stat.S_ISCHR(mode) else (0, 0)
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name) + 1, 0)
        yield _padded([b"070701", *(b"%08x" % field for field in fields), name.encode(), b"\0"])
        yield _padded([content])


def _padded(parts: Iterable[bytes]) -> bytes:
    whole = b"".join(parts)
    return whole + bytes(-len(whole) % 4)
