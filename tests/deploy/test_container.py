# SPDX-License-Identifier: Apache-2.0
"""What the host provides for a container, and what the container must not create itself."""

import os
import subprocess
import sys

import pytest

from ebpflb.kernel.maps.state_dir import BPFFS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_container_mounts_no_bpffs_of_its_own() -> None:
    """If the host's directory is not a bpffs, pins in a new mount would end with the container."""
    handed = f"umount {BPFFS}; mount --bind {BPFFS} {BPFFS}"
    check = f"{sys.executable} -m ebpflb check -o wide; cat /proc/self/mounts"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{handed}; {check}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    (line,) = [line for line in done.stdout.splitlines() if "MISSING" in line]
    assert "mount one there, on the host" in line
    assert f"bpf {BPFFS} bpf" not in done.stdout
