# SPDX-License-Identifier: Apache-2.0
"""A kernel's package from Debian's archive, by apt, which checks its signature.

apt works in a folder of its own, with one source and its own lists: the machine's sources,
lists and installed packages are neither read nor touched, its proxy settings are honoured.
Where the archive cannot be reached, the newest package that was fetched before will do.
"""

import re
import subprocess
import sys
from pathlib import Path

from vagrant.kernels.errors import LabError, need, tool
from vagrant.kernels.listing import Kernel

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
META = "linux-image"


def fetch(kernel: Kernel, folder: Path) -> Path:
    """Return the package of the kernel's image, in ``folder``. Raises LabError."""
    tool("apt-get", "apt")
    need(KEYRING, "debian-archive-keyring")
    apt = _Apt(kernel, folder)
    try:
        apt.run("apt-get", "-qq", "update")
        return apt.download(
            image_package(apt.run("apt-cache", "depends", f"{META}-{kernel.architecture}"))
        )
    except LabError as error:
        kept = sorted(folder.glob("linux-image-*.deb"), key=lambda deb: deb.stat().st_mtime)
        if not kept:
            raise
        print(f"{kernel.name}: {error}; going on with {kept[-1].name}", file=sys.stderr)
        return kept[-1]


def image_package(depends: str) -> str:
    """Return the package with the ABI number, on which the empty one depends."""
    found = re.search(r"Depends: (linux-image-[0-9]\S+)", depends)
    if found is None:
        raise LabError(f"{META} depends on no image: {depends.strip()!r}")
    return found[1]


class _Apt:
    """apt with one source; everything that it writes is below one folder."""

    def __init__(self, kernel: Kernel, folder: Path) -> None:
        self.kernel, self.folder = kernel, folder
        state = folder / "apt"
        (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (state / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        of = kernel.architecture
        source = f"deb [arch={of} signed-by={KEYRING}] {kernel.archive} {kernel.suite} main\n"
        (state / "sources.list").write_text(source)
        (state / "status").touch()
        self.options = {
            "Dir::Etc::SourceList": state / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State": state,
            "Dir::State::Lists": state / "lists",
            "Dir::State::status": state / "status",
            "Dir::Cache": state,
            "APT::Architecture": of,
            "APT::Architectures": of,
            "APT::Sandbox::User": "root",
            "APT::Update::Error-Mode": "any",
            "Acquire::Languages": "none",
            "Acquire::http::Timeout": "20",
            "Acquire::Retries": "1",
        }

    def run(self, program: str, *words: str) -> str:
        """Return its output. Raises LabError with its first error."""
        options = [word for pair in self.options.items() for word in ("-o", "{}={}".format(*pair))]
        done = subprocess.run(
            [program, *options, *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
            where = f"{self.kernel.archive} {self.kernel.suite}"
            raise LabError(f"the kernel cannot be fetched from {where}: {reason[0]}")
        return done.stdout

    def download(self, package: str) -> Path:
        """Return the package's file, fetched unless it is here already."""
        shown = self.run("apt-cache", "show", "--no-all-versions", package)
        name = re.search(r"(?m)^Filename: .*/([^/\n]+)$", shown)
        if name and (self.folder / name[1]).exists():
            return self.folder / name[1]
        self.run("apt-get", "-qq", "download", package)
        return max(self.folder.glob(f"{package}_*.deb"), key=lambda deb: deb.stat().st_mtime)
