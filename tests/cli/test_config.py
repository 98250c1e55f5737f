# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run --config`, up to where it would serve (kube-proxy.md 15)."""

import logging
import os
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.options import Options
from tests.cli.conftest import NEVER, Ebpflb
from tests.config.files import write

Run = Callable[..., Options]


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    """Restore the log level after a test changes the verbosity."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.conf"


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    """Return the least options that are needed besides --config."""
    return ["--manifests", tmp_path, "--state-dir", NEVER, "--run-dir", tmp_path / "run"]


@pytest.fixture
def run(would_serve: Callable[..., tuple[Any, ...]], options: list[object]) -> Run:
    """Return the options that the agent would get."""
    return lambda *words: would_serve(*options, *words)[0]


@pytest.fixture
def refused(ebpflb: Ebpflb, options: list[object]) -> Callable[..., list[str]]:
    """Return the lines of a run that exits with status 1."""

    def call(*words: object) -> list[str]:
        done = ebpflb("run", *options, *words)
        assert done.status == 1
        return [line for line in done.err.splitlines() if " W " not in line]

    return call


def test_config_replaces_flags(run: Run, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file overrides the flags, and the log names the overridden flags."""
    write(file, bindAddress="192.0.2.7")
    options = run("--config", file, "--bind-address=192.0.2.8", "--masquerade-all")
    assert options.bind_address == ip_address("192.0.2.7")
    assert not options.masquerade_all
    assert "overridden by --config: --bind-address, --masquerade-all" in caplog.messages


@pytest.mark.parametrize(
    ("said", "words", "name"),
    [
        ("  From-File ", (), "from-file"),
        ("from-file", ("--hostname-override", " From-FLAG "), "from-flag"),
        ("", ("--node-name=From-Flag",), "from-flag"),
        ("", (), os.uname().nodename.lower()),
    ],
)
def test_hostname_override(
    run: Run, file: Path, said: str, words: tuple[str, ...], name: str
) -> None:
    """The flag, trimmed and in lower case, overrides the file; without both, the host's name is
    used.
    """
    write(file, hostnameOverride=said)
    assert run("--config", file, *words).node_name == name


def test_verbosity_of_the_file(run: Run, file: Path) -> None:
    """The file's verbosity counts too."""
    run("--config", write(file, logging={"verbosity": 4}))
    assert logging.getLogger().level == logging.DEBUG


def test_without_effect(run: Run, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A field that has no effect is named, unless its value is a default."""
    write(
        file,
        ipvs={"excludeCIDRs": ["10.0.0.0/8"], "strictARP": False},
        iptables={"localhostNodePorts": False},
        winkernel={"enableDSR": True},
        logging={"options": {"json": {"splitStream": True}}},
        featureGates={"AllowServiceExternalIPs": True, "Zeta": True, "Alpha": False},
    )
    run("--config", file)
    ignored = f"{file}: accepted, but ignored: ipvs.excludeCIDRs, logging.options, winkernel"
    assert ignored in caplog.messages
    assert "accepted, but ignored: iptables.localhostNodePorts" in caplog.messages
    assert "feature gates without effect: Alpha, Zeta" in caplog.messages


def test_flags_without_effect(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Flags without effect are named, even if they repeat the default."""
    run("--ipvs-strict-arp", "--kube-api-qps", "5", "--boot-id-file=/x", "--conntrack-min=1")
    line = "accepted, but ignored: --kube-api-qps, --boot-id-file, --ipvs-strict-arp"
    assert line in caplog.messages


def test_schedulers_of_ipvs(run: Run, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """--scheduler wins; a kernel scheduler without an equivalent is named, and random is used."""
    write(file, mode="ipvs", ipvs={"scheduler": "wrr"})
    assert run("--config", file, "--scheduler=random").scheduler == "random"
    assert not any("has no counterpart" in line for line in caplog.messages)
    assert run("--proxy-mode=ipvs", "--ipvs-scheduler=lblcr").scheduler == "random"
    assert (
        "ipvs.scheduler has no counterpart in ebpflb, so connections are spread at random: lblcr"
        in caplog.messages
    )


def test_every_error_at_once(refused: Callable[..., list[str]], file: Path) -> None:
    """Each invalid value is reported with file and path."""
    write(file, mode="x", nodePortAddresses=["secondary", "::/0"])
    assert refused("--config", file) == [
        "ebpflb: the configuration is invalid:",
        f'  {file}: mode: must be one of iptables, ipvs, nftables, not "x"',
        f'  {file}: nodePortAddresses[0]: "secondary" is not a CIDR such as 10.0.0.0/8',
    ]
