# SPDX-License-Identifier: Apache-2.0
"""The lab for people with a hypervisor, as far as it can be tried without one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vagrant.kernels import listing

VAGRANT = Path(listing.__file__).parents[1]
SCRIPTS = sorted([*VAGRANT.glob("provision/*"), VAGRANT / "bcc"])


@pytest.mark.skipif(not shutil.which("vagrant"), reason="needs Debian's package vagrant")
def test_vagrantfile(tmp_path: Path) -> None:
    """Vagrant finds no fault with it: a machine for each kernel, and two nodes of a cluster."""
    own = {"VAGRANT_HOME": str(tmp_path / "home"), "VAGRANT_DOTFILE_PATH": str(tmp_path / "dot")}
    done = subprocess.run(
        ["vagrant", "validate", "--ignore-provider"],
        cwd=VAGRANT,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Vagrantfile validated successfully" in done.stdout
    machines = [f"kernel-{name}" for name in listing.kernels()] + ["control", "worker"]
    assert all(f"{machine}:" in done.stdout for machine in machines)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script(script: Path) -> None:
    """Every script of the lab can be run, and bash can read it."""
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[1] == "# SPDX-License-Identifier: Apache-2.0"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert not done.stderr
