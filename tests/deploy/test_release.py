# SPDX-License-Identifier: Apache-2.0
"""What `make release` publishes, as far as it is made without a network: the chart's packages."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.helm import DEPLOY

VERSION = "0.1.1.dev5+gabc"
IMPORTING_ALL = """
import importlib, pkgutil, sys, ebpflb
for module in pkgutil.walk_packages(ebpflb.__path__, "ebpflb."):
    if not module.name.endswith(("__main__", "bcc_child")):
        importlib.import_module(module.name)
print(*sys.modules)
"""


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that packages the chart."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    return script("chart")


def script(name: str) -> Any:
    """The module of one of the release's scripts."""
    spec = importlib.util.spec_from_file_location(name, DEPLOY / f"release/{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpacked(content: bytes) -> dict[str, bytes]:
    """Content by name of a tar archive."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {it.name: archive.extractfile(it).read() for it in archive}  # type: ignore[union-attr]


def test_the_chart_has_every_file_and_the_version(chart: Any, tmp_path: Path) -> None:
    """Helm loads the package, which has the files of the checkout and git's version."""
    files = unpacked(chart.chart(VERSION))
    source = DEPLOY / "chart"
    wanted = {str(it.relative_to(source)) for it in source.rglob("*") if it.is_file()}
    assert files.keys() == wanted - {"ebpflb/.helmignore"}
    named = yaml.safe_load(files["ebpflb/Chart.yaml"])
    assert (named["version"], named["appVersion"]) == ("0.1.1-dev.5+gabc", "0.1.1.dev5-gabc")
    (tmp_path / "chart.tgz").write_bytes(chart.chart(VERSION))
    code = f"import helm_python; helm_python.Chart.load({str(tmp_path / 'chart.tgz')!r}).close()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_layout_names_the_chart_by_digest(chart: Any) -> None:
    """The OCI layout's index leads to a manifest, and that to the chart, with Helm's types."""
    content = chart.chart(VERSION)
    files = unpacked(chart.layout(content, VERSION))

    def blob(described: dict[str, Any]) -> bytes:
        return files["blobs/sha256/" + described["digest"].removeprefix("sha256:")]

    (listed,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blob(listed))
    assert listed["annotations"] == {"org.opencontainers.image.ref.name": "0.1.1-dev.5_gabc"}
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    assert blob(manifest["layers"][0]) == content
    assert json.loads(blob(manifest["config"]))["name"] == "ebpflb"


def test_the_image_has_a_name_where_it_is_loaded(tmp_path: Path) -> None:
    """`podman load` and `ctr image import` read it; skopeo goes on finding the tag."""
    tag = {"org.opencontainers.image.ref.name": "0.1.0"}
    manifest = {"digest": "sha256:0", "annotations": tag}
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    script("image_name").give_name(tmp_path, "localhost/ebpflb:0.1.0")
    (named,) = json.loads((tmp_path / "index.json").read_text())["manifests"]
    assert named["annotations"] == tag | {"io.containerd.image.name": "localhost/ebpflb:0.1.0"}


def test_nothing_imports_what_a_release_leaves_out() -> None:
    """deploy/release/environment removes kubernetes' models, typed requests and asyncio client."""
    code = [sys.executable, "-c", IMPORTING_ALL]
    modules = subprocess.run(code, capture_output=True, text=True, check=True).stdout.split()
    removed = ("kubernetes.client.models.", "kubernetes.client.api.", "kubernetes.aio", "aiohttp")
    assert [it for it in modules if it.startswith(removed)] == []
    assert "kubernetes.client" in modules


def test_the_branch_that_is_checked_out_changes_no_byte(tmp_path: Path) -> None:
    """The source archive names its branch; the workflow checks out a tag, which is on none."""
    checkout, tools = tmp_path / "checkout", tmp_path / "tools"
    for folder in (checkout / "deploy/release", checkout / ".venv/bin", tools):
        folder.mkdir(parents=True)
    (checkout / "deploy/release/make").write_text((DEPLOY / "release/make").read_text())
    (checkout / ".gitignore").write_text(".venv\nbuild\ndist\n")
    asked = checkout / ".venv/bin/python"  # the first that the clone's content is given to
    asked.write_text(f"#!/bin/sh\ngit rev-parse --abbrev-ref HEAD >{tmp_path}/branch\nexit 1\n")
    stand_ins = [tools / "buildah", tools / "update-binfmts"]
    for stand_in in stand_ins:
        stand_in.write_text("#!/bin/sh\n")
    for program in (asked, *stand_ins):
        program.chmod(0o755)
    git = ["git", "-C", str(checkout), "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for words in ("init -q -b main", "add .", "commit -qm x"):
        subprocess.run([*git, *words.split()], check=True)
    path = f"{tools}:{os.environ['PATH']}"
    made = ["bash", str(checkout / "deploy/release/make")]
    subprocess.run(made, env=os.environ | {"PATH": path}, capture_output=True, check=False)
    assert (tmp_path / "branch").read_text() == "HEAD\n"


def test_the_workflow_calls_the_same_target() -> None:
    """Each step is a shell script that bash can read, and `make release` builds everything."""
    workflow = DEPLOY.parent / ".github/workflows/release.yml"
    steps = yaml.safe_load(workflow.read_text())["jobs"]["release"]["steps"]
    scripts = [step["run"] for step in steps if "run" in step]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    made = [command for script in scripts for command in re.findall(r"\bmake release\b.*", script)]
    assert made == ['make release KEY=/tmp/key SOURCE_URL="$SOURCE_URL"']
