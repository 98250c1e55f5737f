# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run` that cannot run: which option or what of the node, in one line; nothing attached."""

import sys
from pathlib import Path

import pytest

from ebpflb.datapath import links
from ebpflb.datapath.state import BPFFS
from tests.cli.conftest import Done, Ebpflb

STATE = BPFFS / "ebpflb-never"


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    """All that is needed, and good."""
    return ["--manifests", tmp_path, "--state-dir", STATE, "--run-dir", tmp_path / "run"]


@pytest.fixture
def run(ebpflb: Ebpflb) -> Ebpflb:
    """`ebpflb run`, which must attach nothing and make no state."""

    def refused(*words: object) -> Done:
        before = links.foreign(links.cgroup_root(), ())
        done = ebpflb("run", *words)
        assert links.foreign(links.cgroup_root(), ()) == before
        assert not STATE.exists()
        return done

    return refused


def test_no_such_directory(run: Ebpflb) -> None:
    """A directory of manifests that is not there."""
    done = run("--manifests", "/nowhere")
    assert done.status == 2
    assert "'--manifests': Directory '/nowhere' does not exist" in done.err


def test_no_such_kubeconfig(run: Ebpflb) -> None:
    """A kubeconfig that is not there."""
    done = run("--kubeconfig", "/nowhere")
    assert done.status == 2
    assert "--kubeconfig" in done.err


def test_two_sources(run: Ebpflb, options: list[object], tmp_path: Path) -> None:
    """One source at a time."""
    (tmp_path / "config").touch()
    done = run(*options, "--kubeconfig", tmp_path / "config")
    assert done.status == 2
    assert "--manifests and --kubeconfig exclude each other" in done.err


@pytest.mark.parametrize("text", ["10.0.0.0/33", "eth0", "primary,10.0.0.0/8", "::/129"])
def test_nodeport_addresses(run: Ebpflb, options: list[object], text: str) -> None:
    """'primary' or CIDRs, and nothing else."""
    done = run(*options, "--nodeport-addresses", text)
    assert done.status == 2
    assert "--nodeport-addresses" in done.err


def test_unreadable_kubeconfig(run: Ebpflb, tmp_path: Path) -> None:
    """A kubeconfig that is none ends it in one line."""
    config = tmp_path / "config"
    config.write_text("apiVersion: v1\n")
    done = run("--kubeconfig", config, "--state-dir", STATE, "--run-dir", tmp_path)
    assert done.status == 1
    assert f"ebpflb: {config}: Invalid kube-config file" in done.err


def test_no_bcc(run: Ebpflb, options: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without BCC the Debian package is named."""
    monkeypatch.setitem(sys.modules, "bcc", None)
    done = run(*options)
    assert done.status == 1
    assert "BCC: missing; BCC is missing: apt install python3-bpfcc" in done.err


def test_no_cgroup(run: Ebpflb, options: list[object]) -> None:
    """A wrong cgroup is named, and how to name another."""
    done = run(*options, "--cgroup-root", "/tmp")
    assert done.status == 1
    (line,) = [line for line in done.err.splitlines() if line.startswith("  ")]
    assert "cgroup v2: /tmp is no cgroup v2" in line
    assert "--cgroup-root" in line


def test_no_bpffs(run: Ebpflb, options: list[object], tmp_path: Path) -> None:
    """A state directory in no bpffs is named."""
    done = run(*options, "--state-dir", tmp_path / "state")
    assert done.status == 1
    assert f"{tmp_path}/state is in no bpffs" in done.err


def test_unknown_option(run: Ebpflb) -> None:
    """An unknown option is a wrong call."""
    assert run("--manifest", "/tmp").status == 2
