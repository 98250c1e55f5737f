# SPDX-License-Identifier: Apache-2.0
"""`ebpflb check`: what this node can do, and for what is missing, what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ebpflb.datapath import links
from ebpflb.datapath.state import BPFFS
from tests.cli.conftest import Ebpflb

STATE = BPFFS / "ebpflb-never"
AS_NOBODY = """
import os
from ebpflb.cli import main
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
main()
"""


def as_nobody(*words: str) -> "subprocess.CompletedProcess[str]":
    """Becomes nobody after it has read the code, which may lie where nobody may read."""
    command = [sys.executable, "-c", AS_NOBODY, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def missing(output: str) -> set[str]:
    return {it["feature"] for it in json.loads(output) if it["required"] and not it["ok"]}


def test_yes(ebpflb: Ebpflb) -> None:
    """On a machine that runs these tests the answer is yes."""
    done = ebpflb("check", "--state-dir", STATE)
    assert (done.status, done.err) == (0, "")
    for feature in ("root", "BCC", "bpffs", "cgroup v2", "hook cgroup/connect4"):
        assert feature in done.out
    assert "MISSING" not in done.out


def test_leaves_nothing(ebpflb: Ebpflb) -> None:
    """It attaches nothing and makes nothing."""
    before = links.foreign(links.cgroup_root(), ())
    ebpflb("check", "--state-dir", STATE)
    assert links.foreign(links.cgroup_root(), ()) == before
    assert not STATE.exists()


def test_json_and_yaml(ebpflb: Ebpflb) -> None:
    """Both say the same, feature by feature."""
    said = ebpflb("check", "--state-dir", STATE, "-o", "json").out
    same = ebpflb("check", "--state-dir", STATE, "-o", "yaml").out
    assert json.loads(said) == yaml.safe_load(same)
    assert not missing(said)


@pytest.mark.parametrize("cgroup", ["/tmp", "/nowhere"])
def test_no_cgroup(ebpflb: Ebpflb, cgroup: str) -> None:
    """What is no cgroup v2 is named, and how to name another."""
    done = ebpflb("check", "--state-dir", STATE, "--cgroup-root", cgroup)
    assert done.status == 1
    (line,) = [line for line in done.out.splitlines() if "MISSING" in line]
    assert "cgroup v2" in line
    assert cgroup in line
    assert "--cgroup-root" in line


def test_no_bpffs(ebpflb: Ebpflb, tmp_path: Path) -> None:
    """A state directory that can be in no bpffs is named."""
    done = ebpflb("check", "--state-dir", tmp_path, "-o", "json")
    assert done.status == 1
    assert missing(done.out) == {"bpffs"}
    assert str(tmp_path) in done.out


def test_no_bcc(ebpflb: Ebpflb, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without BCC the Debian package is named."""
    monkeypatch.setitem(sys.modules, "bcc", None)
    done = ebpflb("check", "--state-dir", STATE)
    assert done.status == 1
    assert "python3-bpfcc" in done.out


def test_nobody_may_check() -> None:
    """Without root it says so, and no more than it can know."""
    done = as_nobody("check")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "MISSING" in line]
    assert "root" in line
    assert "run as root" in line


COMMANDS = ["run --manifests /tmp", "maps dump", "status", "cleanup", "demo"]


@pytest.mark.parametrize("words", COMMANDS)
def test_nobody_may_do(words: str) -> None:
    """Every other command needs root, and says so in one line."""
    done = as_nobody(*words.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ebpflb: this needs root: run it with sudo\n"
