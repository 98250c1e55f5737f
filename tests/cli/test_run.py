# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run` that cannot run: which option or what of the node, in one line; nothing attached."""

import sys
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path

import pytest

from ebpflb.datapath import links
from ebpflb.datapath.state import BPFFS
from ebpflb.model.locality import Detector, Mode
from ebpflb.settings import Settings
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


@pytest.mark.parametrize(
    ("option", "text", "why"),
    [
        ("--devices", "", "no pattern"),
        ("--devices", "!", "no pattern"),
        ("--devices", "eth0 eth1", "no pattern"),
        ("--devices", "../eth0", "no pattern"),
        ("--masquerade-ports", "20000", "is not LOW-HIGH"),
        ("--masquerade-ports", "a-b", "is not LOW-HIGH"),
        ("--masquerade-ports", "0-100", "no range of ports"),
        ("--masquerade-ports", "30000-20000", "no range of ports"),
        ("--masquerade-ports", "1-65536", "no range of ports"),
        ("--cluster-cidr", "10.244.0.0", "is no CIDR"),
        ("--cluster-cidr", "10.0.0.0/8,11.0.0.0/8", "more than one CIDR of a family"),
        ("--detect-local-mode", "Bridge", "is not one of"),
    ],
)
def test_bad_text(run: Ebpflb, options: list[object], option: str, text: str, why: str) -> None:
    """The option is named, and what is wrong with its text."""
    done = run(*options, option, text)
    assert done.status == 2
    assert f"'{option}'" in done.err
    assert why in done.err


@pytest.mark.parametrize(
    ("mode", "option"),
    [
        ("BridgeInterface", "--pod-bridge-interface"),
        ("InterfaceNamePrefix", "--pod-interface-name-prefix"),
    ],
)
def test_mode_lacks(run: Ebpflb, options: list[object], mode: str, option: str) -> None:
    """A mode that goes by a device wants to be told which."""
    done = run(*options, "--detect-local-mode", mode)
    assert done.status == 2
    assert f"--detect-local-mode {mode} needs {option}" in done.err


@pytest.fixture
def chosen(ebpflb: Ebpflb, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """What `ebpflb run` makes of its options."""
    seen: list[Settings] = []
    monkeypatch.setattr(sys.modules["ebpflb.cli.run"], "_serve", seen.append)

    def run(*words: object) -> Settings:
        ebpflb("run", *words)
        return seen.pop()

    return run


def test_all_that_is_chosen(chosen: Callable[..., Settings], options: list[object]) -> None:
    """Every option reaches the agent, as what it means."""
    settings = chosen(
        *(*options, "--devices", "eth*", "--devices", "!eth9", "--masquerade-all"),
        *("--masquerade-local-backends", "--masquerade-ports", "40000-40099"),
        *("--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", "cni0"),
        *("--cluster-cidr", "10.244.0.0/16, fd00::/56", "--nodeport-addresses", "10.0.0.0/8"),
    )
    cidrs = (ip_network("10.244.0.0/16"), ip_network("fd00::/56"))
    assert settings.detector == Detector(Mode.BRIDGE, cidrs, "cni0")
    assert settings.devices == ("eth*", "!eth9")
    assert settings.nodeport_addresses == ("10.0.0.0/8",)
    assert settings.fields == {
        "flags": {"guard_nodeports", "masquerade_all", "masquerade_here"},
        "first_port": 40000,
        "last_port": 40099,
    }


def test_nothing_chosen(chosen: Callable[..., Settings], options: list[object]) -> None:
    """Without options the agent gets its own defaults."""
    settings = chosen(*options)
    assert settings == Settings(
        settings.places, settings.node_name, settings.cgroup, settings.manifests
    )


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
