# SPDX-License-Identifier: Apache-2.0
"""The image's recipe, read by hadolint and by us: `make test` has nothing that could build it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.helm import DEPLOY

DOCKERFILE = DEPLOY / "image/Dockerfile"
ROOT = DEPLOY.parent


def lint(path: Path) -> "subprocess.CompletedProcess[str]":
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [hadolint, "--no-color", "--failure-threshold", "style", path]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def stages() -> list[str]:
    return re.split(r"(?m)^FROM ", DOCKERFILE.read_text())[1:]


def test_hadolint() -> None:
    """It finds nothing."""
    done = lint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_can_refuse(tmp_path: Path) -> None:
    """The test above can fail."""
    bad = tmp_path / "Dockerfile"
    bad.write_text(DOCKERFILE.read_text().replace("debian:${DEBIAN}-slim AS", "debian AS"))
    assert "DL3006" in lint(bad).stdout


def test_what_it_is_made_of_is_let_in() -> None:
    """.dockerignore lets in what the package is built from, and nothing else."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    named = {line[1:] for line in lines}
    assert named == {"LICENSES", "README.md", "bpf", "ebpflb", "pyproject.toml", "setup.cfg"}
    assert all((ROOT / name).exists() for name in named)


def test_no_compiler_and_no_root() -> None:
    """The last stage installs neither, and starts as somebody else; the chart says as whom."""
    last = stages()[-1]
    (packages,) = re.findall(r"install --yes --no-install-recommends (.*?) &&", last)
    assert packages.split() == ["python3", "python3-bpfcc", "iptables"]
    (user,) = re.findall(r"(?m)^USER (\d+):(\d+)$", last)
    assert "0" not in user
    assert 'ENTRYPOINT ["ebpflb"]' in last


@pytest.mark.parametrize("label", ["title", "description", "version", "licenses"])
def test_labels(label: str) -> None:
    """What the image is, in the words of the OCI."""
    assert f"org.opencontainers.image.{label}=" in stages()[-1]
