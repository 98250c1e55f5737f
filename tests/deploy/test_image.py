# SPDX-License-Identifier: Apache-2.0
"""The image's recipe, checked by hadolint and here, and its build with fake engines, because `make
test` has no engine that could build.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.helm import DEPLOY

WORKFLOWS = DEPLOY.parent / ".github/workflows"
DOCKERFILE = DEPLOY / "image/Dockerfile"


def lint(path: Path) -> "subprocess.CompletedProcess[str]":
    hadolint = Path(sys.executable).with_name("hadolint")
    command: list[str | Path] = [hadolint, "--no-color", "--failure-threshold", "style", path]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def stages() -> list[str]:
    return re.split(r"(?m)^FROM ", DOCKERFILE.read_text())[1:]


def test_hadolint_finds_nothing() -> None:
    done = lint(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def packages(stage: str) -> set[str]:
    found = re.findall(r"install --yes --no-install-recommends (.*?) &&", stage)
    return {package for line in found for package in line.split()}


def test_no_compiler_in_the_image() -> None:
    """BCC is only in the stage that compiles bytecode, and in the image built on request."""
    run, build, compiler, small, last = stages()
    assert packages(run) == {"python3", "${TOOLS}"}
    assert packages(build) == {"python3-venv"}
    assert packages(compiler) == {"python3-bpfcc"}
    assert packages(small) == packages(last) == set()
    assert small.split()[0] == compiler.split()[0] == "run"


def test_the_base_is_named_by_digest_and_every_stage_comes_from_it() -> None:
    """A tag can be moved to other content; a digest cannot."""
    assert re.search(r"(?m)^ARG BASE=debian:\w+-slim@sha256:[0-9a-f]{64}$", DOCKERFILE.read_text())
    assert [stage.split()[0] for stage in stages()] == ["${BASE}", *["run"] * 3, "scratch"]


def renew_base(folder: Path, digest: str) -> "subprocess.CompletedProcess[str]":
    """Renew the base in a copy of the recipe, with a skopeo that prints this."""
    image = folder / "deploy/image"
    image.mkdir(parents=True)
    for name in ("Dockerfile", "renew-base"):
        shutil.copy(DOCKERFILE.with_name(name), image)
    shutil.copytree(WORKFLOWS, folder / ".github/workflows")
    skopeo = folder / "skopeo"
    skopeo.write_text(f'#!/bin/sh\necho "$*" >>{folder}/asked\necho {digest}\n')
    skopeo.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [image / "renew-base"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_digest_is_renewed(tmp_path: Path) -> None:
    """The registry is asked about each tag, and only the digests change."""
    digest = "sha256:" + "5" * 64
    assert renew_base(tmp_path, digest).returncode == 0
    asked = re.findall(r"docker://docker.io/library/(\S+)", (tmp_path / "asked").read_text())
    assert asked == ["debian:bookworm-slim", "debian:trixie-slim"]
    workflow = Path("workflows/pull-request.yml")
    for file, before in (
        ("deploy/image/Dockerfile", DOCKERFILE),
        (".github" / workflow, WORKFLOWS.parent / workflow),
    ):
        wanted = re.sub(r"(debian:[\w-]+@sha256:)\w+", rf"\g<1>{'5' * 64}", before.read_text())
        assert (tmp_path / file).read_text() == wanted != before.read_text()


ENGINE = """#!/bin/sh
echo "$*" >>{folder}/asked
[ "$1" != build ] || cat build/pip-ca.pem >>{folder}/authorities 2>/dev/null
[ "$1" != images ] || echo {size}
[ "$1" != info ]
"""


def build(
    folder: Path, *words: str, size: str, base: str = "", **more: str
) -> "subprocess.CompletedProcess[str]":
    """Build an image from a copy of the recipe with a wheel. The docker here has no engine; the
    podman makes an image of this size.
    """
    image = folder / "deploy/image"
    if not image.exists():
        shutil.copytree(DOCKERFILE.parent, image)
        (folder / "dist").mkdir()
        (folder / "dist/ebpflb-0.1.1.dev5+gabc-py3-none-any.whl").touch()
        (folder / "git").write_text("#!/bin/sh\necho 1790000000\n")
        (folder / "git").chmod(0o755)
    for name in ("docker", "podman"):
        (folder / name).write_text(ENGINE.format(folder=folder, size=f"'{size}'"))
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    plain = {"PATH": path, "ARCH": "", "BASE": base, "PIP_INDEX_URL": "", "PIP_CERT": ""}
    environment = {**os.environ, **plain, **more}
    command: list[str | Path] = [image / "build", *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_an_image_of_140_mb_is_built(tmp_path: Path) -> None:
    """The engine that works builds the image, under the chart's name, from the requested base."""
    done = build(tmp_path, size="140 MB", base="localhost/debian:bookworm-slim")
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text()
    for given in ("BASE=localhost/debian:bookworm-slim", "VERSION=0.1.1.dev5+gabc",
                  "CREATED=2026-09-21T14:13:20Z"):  # fmt: skip
        assert f"--build-arg {given}" in asked
    assert "--timestamp 1790000000" in asked
    (processes,) = re.findall(r"--ulimit nproc=(\d+)", asked)
    assert int(processes) <= int(Path("/proc/sys/kernel/pid_max").read_text())
    assert "--tag localhost/ebpflb:dev ." in asked
    assert done.stdout.splitlines()[-1].endswith("140 MB, by podman")


@pytest.mark.parametrize("size", ["141MB", "1.02 GB"])
def test_a_larger_one_is_a_failure(tmp_path: Path, size: str) -> None:
    """A larger image is a failure, because every node would have to load it; only the image with
    BCC may be larger.
    """
    done = build(tmp_path, size=size)
    assert done.returncode == 1
    assert f"has {size}, and 140000000 bytes are allowed" in done.stderr
    assert build(tmp_path, "compiler", size=size).returncode == 0
    assert "--target compiler" in (tmp_path / "asked").read_text()
