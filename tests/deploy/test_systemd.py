# SPDX-License-Identifier: Apache-2.0
"""The systemd unit for a machine without a DaemonSet."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ebpflb
from ebpflb.cli.run import run
from tests.deploy.helm import DEPLOY

UNIT = DEPLOY / "systemd/ebpflb.service"
INSTALLED = "/opt/ebpflb/bin/ebpflb"
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is missing")


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    return unit["Service"]


def verify(text: str, folder: Path) -> str:
    """Return systemd's messages about the unit, with the started program in place."""
    path = folder / "ebpflb.service"
    path.write_text(text.replace(INSTALLED, str(Path(sys.executable).with_name("ebpflb"))))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stderr


@needs_systemd
def test_systemd_takes_it(tmp_path: Path) -> None:
    """systemd reports nothing about the unit."""
    assert verify(UNIT.read_text(), tmp_path) == ""


def test_it_starts_an_agent(service: configparser.SectionProxy) -> None:
    """The unit has valid flags, restarts the agent whenever it ends, and has no reload."""
    program, command, *flags = service["ExecStart"].split()
    known = {option for parameter in run.params for option in parameter.opts}
    assert (program, command) == (INSTALLED, run.name)
    assert {flag.partition("=")[0] for flag in flags if flag.startswith("-")} <= known
    assert service["Restart"] == "always"
    assert "ExecReload" not in service
    assert "ExecStopPost" not in service  # what is pinned serves on


def test_it_may_open_the_sockets_that_it_opens(service: configparser.SectionProxy) -> None:
    """The unit allows exactly the address families that the package uses; those of frames, which
    only --l2-pool needs, are left to a drop-in.
    """
    package = Path(ebpflb.__file__).parent
    used = {
        family
        for path in package.rglob("*.py")
        for family in re.findall(r"\bsocket\.(AF_\w+)", path.read_text())
    }
    allowed = set(service["RestrictAddressFamilies"].split())
    assert used - {"AF_UNSPEC", "AF_PACKET"} == allowed
