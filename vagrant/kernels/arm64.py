# SPDX-License-Identifier: Apache-2.0
"""What an arm64 kernel needs besides itself: programs for it, which this machine cannot run.

<cache>/6.1-arm64/root-<hash>/   Debian's packages and our locked wheels for arm64, unpacked only
    opt/lab/                     the wheels
    lib/modules/<release>/       the kernel's modules
    ebpflb/                      the checkout's files, and the bytecode, renewed by each run
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from vagrant.kernels.errors import LabError, tool

CHECKOUT, PYTHON = Path("/ebpflb"), "/usr/bin/python3"
LIBRARIES = "usr/local/lib/python3.11/dist-packages"  # where Debian's python3 looks
SUITE, ARCHIVE = "bookworm", "http://deb.debian.org/debian"
PACKAGES = (
    "base-files,bash,busybox-static,ca-certificates,conntrack,coreutils,dash,findutils,gawk,grep"
    ",hostname,ipset,iproute2,iptables,kmod,libc-bin,mount,nftables,openssl,procps,python3,sed,tar"
    ",util-linux"
)
REQUIREMENTS = Path("requirements/test.txt")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
GENERATED = ("ebpflb/version.py",)  # by the installation of the checkout
# What the packages' own scripts would write.
WRITTEN = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
ALTERNATIVES = ("iptables", "ip6tables")


def root(folder: Path) -> Path:
    """Return the folder with programs for arm64, below ``folder``; made once. Raises LabError."""
    made = folder / f"root-{_fingerprint()}"
    if made.is_dir():
        return made
    half = made.with_suffix(f".{os.getpid()}")
    try:
        _unpack(half)
        for old in folder.glob("root-????????????"):
            shutil.rmtree(old, ignore_errors=True)
        half.rename(made)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return made


def _fingerprint() -> str:
    parts = Path(__file__).read_bytes() + REQUIREMENTS.read_bytes()
    return hashlib.sha256(parts).hexdigest()[:12]


def _unpack(folder: Path) -> None:
    debian = [tool("mmdebstrap", "mmdebstrap"), "--quiet", "--architectures=arm64"]
    debian += ["--variant=extract", "--skip=check/qemu", f"--include={PACKAGES}"]
    _run([*debian, SUITE, str(folder), ARCHIVE])
    for name, text in WRITTEN.items():
        (folder / name).write_text(text)
    for name in ALTERNATIVES:
        for end in ("", "-save", "-restore"):
            (folder / f"usr/sbin/{name}{end}").symlink_to(f"{name}-nft{end}")
    wheels = [".venv/bin/python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    wheels += [f"--target={folder / LIBRARIES}", "--no-deps", "--require-hashes"]
    wheels += ["--only-binary=:all:", "--python-version=3.11"]
    wheels += [f"--platform={each}" for each in PLATFORMS]
    _run([*wheels, f"--requirement={REQUIREMENTS}"])
    (folder / LIBRARIES / "ebpflb.pth").write_text(f"{CHECKOUT}\n")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()
        raise LabError(f"{command[0]} failed: {reason[-1]}")


def bring(made: Path, compiled: Path) -> None:
    """Copy the checkout's files, even uncommitted ones, and existing bytecode."""
    inside = made / CHECKOUT.relative_to("/")
    shutil.rmtree(inside, ignore_errors=True)
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(list_files, capture_output=True, text=True, check=True).stdout
    for name in filter(None, (*names.split("\0"), *GENERATED)):
        if Path(name).is_file():
            (inside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, inside / name)
    if compiled.exists():
        shutil.copytree(compiled, inside / "bytecode", dirs_exist_ok=True)
