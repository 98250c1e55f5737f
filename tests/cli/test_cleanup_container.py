# SPDX-License-Identifier: Apache-2.0
"""`ebpflb cleanup` and `check` as they run in containers: mount points, a read-only root, /host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir
from tests.cli.conftest import Ebpflb

FINDS = "from pathlib import Path; from ebpflb.kernel.attach.cgroup_links import cgroup_root; "


def in_a_container(script: str) -> "subprocess.CompletedProcess[str]":
    """Run in a new mount namespace, and in a network namespace without reserved ports."""
    command = ["unshare", "--mount", "--net", "bash", "-euc", script]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_cleanup_where_the_run_directory_is_a_mount_point_on_a_read_only_root(
    tmp_path: Path,
) -> None:
    """In the DaemonSet's container the directory cannot be removed, which is not an error."""
    root = tmp_path / "root"
    (root / "run").mkdir(parents=True)
    state = BPFFS / f"ebpflb-test-{os.getpid()}-container"
    done = in_a_container(
        f"mount -t tmpfs tmpfs {root}; mkdir {root}/run; mount -t tmpfs tmpfs {root}/run;"
        f" mount -o remount,ro {root}; touch {root}/run/left; rm {root}/run/left;"
        f" {sys.executable} -m ebpflb cleanup --state-dir {state} --run-dir {root}/run"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"nothing is left of {state}\n"


def test_cleanup_refuses_where_it_cannot_find_what_was_reserved(
    ebpflb: Ebpflb, tmp_path: Path
) -> None:
    """Cleanup refuses without the record of reserved ports. The pins stay too: a partial removal
    would hide the rest.
    """
    state = StateDir(BPFFS / f"ebpflb-test-{os.getpid()}-lost")
    state.prepare()
    try:
        where = ["--state-dir", state.directory, "--run-dir", tmp_path / "nowhere"]
        done = ebpflb("cleanup", *where)
        assert done.status == 1
        assert str(tmp_path / "nowhere") in done.err and "--run-dir" in done.err
        assert state.exists()
        (tmp_path / "nowhere").mkdir()
        dry = ebpflb("cleanup", "--dry-run", *where)
        assert (dry.status, dry.out) == (0, f"would be removed: the maps in {state.directory}\n")
        assert state.exists()
        assert ebpflb("cleanup", *where).status == 0
        assert not state.directory.exists()
    finally:
        unpin_all(state)


@pytest.mark.parametrize("given", ["cgroup", "cgroup/unified", "cgroup/unified/sub"])
def test_cgroup_v2_is_found_below_the_directory_of_a_hybrid_host(
    tmp_path: Path, given: str
) -> None:
    """On a hybrid host /host/sys/fs/cgroup is a tmpfs, and cgroup v2 is mounted at unified."""
    root = tmp_path / "cgroup"
    root.mkdir()
    found = tmp_path / given if "unified" in given else root / "unified"
    done = in_a_container(
        f"mount -t tmpfs tmpfs {root}; mkdir {root}/unified;"
        f" mount -t cgroup2 cgroup2 {root}/unified;"
        f" {sys.executable} -c '{FINDS} print(cgroup_root(Path(\"{tmp_path / given}\")))'"
    )
    assert (done.returncode, done.stdout) == (0, f"{found}\n"), done.stderr


def test_check_ends_in_words(ebpflb: Ebpflb) -> None:
    """The last line is the verdict, because `kubectl debug` hides the exit status."""
    done = ebpflb("check", "--cgroup-root", "/nothing/here")
    assert done.status == 1
    assert done.out.splitlines()[-1] == "This node cannot run ebpflb: it lacks cgroup v2."
