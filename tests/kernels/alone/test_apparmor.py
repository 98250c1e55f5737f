# SPDX-License-Identifier: Apache-2.0
"""With the AppArmor profile of deploy/ enforced, the agent serves, and other writes are denied."""

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.options import Paths
from tests.deploy import rights
from tests.deploy.helm import DEPLOY

ENABLED = Path("/sys/module/apparmor/parameters/enabled")
SECURITY = Path("/sys/kernel/security")
UNDER = ("aa-exec", "--profile", "ebpflb", "--")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not ENABLED.exists() or ENABLED.read_text().strip() != "Y",
    reason="this kernel has no AppArmor, or only root may load a profile",
)


@pytest.fixture(scope="module", autouse=True)
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Load the profile, with paths relative to the chroot that is the lab's root."""
    if not (SECURITY / "apparmor").exists():
        subprocess.run(["mount", "-t", "securityfs", "securityfs", SECURITY], check=True)
    text = (DEPLOY / "apparmor/ebpflb").read_text()
    path = tmp_path_factory.mktemp("profile") / "ebpflb"
    path.write_text(text.replace("flags=(", "flags=(chroot_relative,"))
    parser = ["apparmor_parser", "--skip-cache"]
    subprocess.run([*parser, "--replace", path], check=True)
    yield
    subprocess.run([*parser, "--remove", path], check=True)


def test_agent_serves(tmp_path: Path) -> None:
    """The agent serves with the unit's capabilities and the seccomp profile too, also after a
    restart.
    """
    granted = rights.granted_by_the_unit()
    with rights.cluster(tmp_path, Paths.cache) as made:
        made.agent.under = [*rights.limited_to(granted, tmp_path), *UNDER]
        for _ in range(2):
            made.agent.start()
            assert made.agent.process
            current = Path(f"/proc/{made.agent.process.pid}/attr/current")
            assert current.read_text().strip("\0\n") == "ebpflb (enforce)"
            rights.serves(made)
            assert rights.packet_path(made) == "netfilter"
            assert rights.moves_connected_datagrams(made, 60)
            made.agent.stop()
        assert " E " not in made.agent.log()


@pytest.mark.parametrize(
    "command",
    [
        "echo > /etc/ebpflb-denied",
        "echo > /usr/bin/ebpflb-denied",
        "mount -t tmpfs tmpfs /mnt",
        "echo 0 > /proc/sys/kernel/printk",
        "chroot /",
    ],
)
def test_others_are_refused(command: str) -> None:
    """Accesses that the agent does not need fail, although root has them without the profile."""
    words = [*UNDER, "sh", "-c", f"{command}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode, shlex.join(words)
    refused = ("ermission denied", "not permitted", "read-only")  # the last: mount(8) of EACCES
    assert any(word in done.stderr for word in refused), done.stderr
