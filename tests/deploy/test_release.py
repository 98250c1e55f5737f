# SPDX-License-Identifier: Apache-2.0
"""What `make release` publishes, as far as it needs no network: the chart's packages."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.helm import DEPLOY

VERSION = "0.1.1.dev5+gabc"
ROOT = DEPLOY.parent
# As in a release, kubernetes imports no part of itself. cffi parses declarations that are new.
IMPORTING_ALL = """
import importlib, importlib.util, pkgutil, sys, cffi.cparser, ebpflb, ebpflb_page
kubernetes = importlib.util.module_from_spec(importlib.util.find_spec("kubernetes"))
sys.modules["kubernetes"] = kubernetes
for package in (ebpflb, ebpflb_page):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", "bcc_child")):
            importlib.import_module(module.name)
print(*sys.modules)
"""


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script that packages the chart."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    return script("chart")


def script(name: str) -> Any:
    """Return the module of one of the release's scripts."""
    spec = importlib.util.spec_from_file_location(name, DEPLOY / f"release/{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpacked(content: bytes) -> dict[str, bytes]:
    """Return the content of a tar archive by name."""
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
    """The OCI layout's index leads to a manifest, and the manifest to the chart, with Helm's
    types.
    """
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
    """`podman load` and `ctr image import` read the name; skopeo still finds the tag."""
    tag = {"org.opencontainers.image.ref.name": "0.1.0"}
    manifest = {"digest": "sha256:0", "annotations": tag}
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    script("image_name").give_name(tmp_path, "localhost/ebpflb:0.1.0")
    (named,) = json.loads((tmp_path / "index.json").read_text())["manifests"]
    assert named["annotations"] == tag | {"io.containerd.image.name": "localhost/ebpflb:0.1.0"}


def test_a_release_has_what_is_imported_and_nothing_else() -> None:
    """Nothing imports the parts of kubernetes that deploy/release/environment removes; each locked
    package is imported, or left out of image and packages.
    """
    code = [sys.executable, "-c", IMPORTING_ALL]
    modules = subprocess.run(code, capture_output=True, text=True, check=True).stdout.split()
    script = (DEPLOY / "release/environment").read_text()
    (parts,) = re.findall(r'rm -r "\$packages/kubernetes/"\{(.*)\}', script)
    removed = ["client.models.", "client.api.", *parts.split(",")]
    names = tuple(f"kubernetes.{it}" for it in removed)
    assert [it for it in modules if it.startswith(names)] == []
    assert "kubernetes.client" in modules
    (unused,) = re.findall(r"unused=\((.*?)\)", script, re.DOTALL)
    locked = re.findall(r"(?m)^([\w-]+)==(?!.*win32)", (ROOT / "requirements/ui.txt").read_text())
    imported = {it.partition(".")[0] for it in modules} - {"_distutils_hack"}  # by a .pth file
    provided = {
        re.sub(r"[-_.]+", "-", distribution).lower()
        for module, distributions in packages_distributions().items()
        for distribution in distributions
        if module in imported
    }
    assert set(locked) - provided == set(unused.split())


def test_the_branch_that_is_checked_out_changes_no_byte(tmp_path: Path) -> None:
    """The source archive is the same, whether a branch is checked out or, as in the workflow, a
    tag.
    """
    checkout, tools = tmp_path / "checkout", tmp_path / "tools"
    for folder in (checkout / "deploy/release", checkout / ".venv/bin", tools):
        folder.mkdir(parents=True)
    (checkout / "deploy/release/make").write_text((DEPLOY / "release/make").read_text())
    (checkout / ".gitignore").write_text(".venv\nbuild\ndist\n")
    asked = checkout / ".venv/bin/python"  # the first that the clone's content is given to
    asked.write_text(f"#!/bin/sh\ngit rev-parse --abbrev-ref HEAD >{tmp_path}/branch\nexit 1\n")
    (checkout / "deploy/image").mkdir()
    stand_ins = [tools / "buildah", tools / "rpmbuild", checkout / "deploy/image/emulate"]
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


PIP = """#!/bin/sh
while [ $# -gt 0 ]; do
	case $1 in
	--python-version) tag=cpython-$(echo "$2" | tr -d .) ;;
	--target) into=$2 ;;
	--requirement) cat "$2" >{folder}/lock ;;
	esac
	shift
done
[ "$into" ] || exit 0
mkdir -p "$into/compiled" "$into/left_out"
for name in _top compiled/_part left_out/_part; do touch "$into/$name.$tag.so"; done
"""


RPMBUILD = """#!/bin/sh
while [ "$1" != --buildroot ]; do shift; done
cp --recursive --no-dereference "$2" {folder}/rpm
"""


LIBRARY = "environment/lib/python3.13/site-packages"
ENVIRONMENT = {
    f"{LIBRARY}/compiled_one-2.0.dist-info/WHEEL": "Root-Is-Purelib: false\n",
    f"{LIBRARY}/pure-1.0.dist-info/WHEEL": "Root-Is-Purelib: true\n",
    f"{LIBRARY}/compiled/__pycache__/code.cpython-313.pyc": "",
    "environment/pyvenv.cfg": "home = /usr/bin\nversion = 3.13.5\n",
    "environment/bin/ebpflb": "",
    "environment/bin/python3.13": "",
    "environment/share/bash-completion/completions/ebpflb": "",
    "environment/share/fish/vendor_completions.d/ebpflb.fish": "",
    "environment/share/zsh/site-functions/_ebpflb": "",
    "requirements/ui.txt": "compiled-one==2.0 \\\n    --hash=a\npure==1.0 \\\n    --hash=b\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return the package roots for an environment with one compiled module. pip is a stand-in that
    records its requests, and so is rpmbuild, because Debian before a release has none.
    """
    for name, text in (
        ENVIRONMENT
        | {
            "python": PIP.format(folder=tmp_path),
            "tools/rpmbuild": RPMBUILD.format(folder=tmp_path),
        }
    ).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("python", "tools/rpmbuild"):
        (tmp_path / name).chmod(0o755)
    for name in ("CHANGELOG.md", "LICENSE", "deploy", "setup.cfg"):
        (tmp_path / name).symlink_to(DEPLOY.parent / name)
    made = ["deploy/release/packages", "environment", "0.1.1.dev5+gabc", "amd64", "."]
    path = f"{tmp_path / 'tools'}:{os.environ['PATH']}"
    environment = os.environ | {"python": "./python", "PATH": path}
    subprocess.run(["bash", *made], cwd=tmp_path, env=environment, check=True, capture_output=True)
    (deb,) = tmp_path.glob("*.deb")
    subprocess.run(["dpkg-deb", "--raw-extract", deb, tmp_path / "root"], check=True)
    return tmp_path / "root"


def test_the_debian_package_serves_each_python(package: Path) -> None:
    """The package has its compiled modules for each supported Python, everything else once, and no
    .pyc file.
    """
    control = (package / "DEBIAN/control").read_text()
    first, end = (int(each) for each in re.findall(r"python3 \((?:>=|<<) 3\.(\d+)\)", control))
    folders = package / "opt/ebpflb/lib"
    tags = [f"cpython-3{minor}.so" for minor in range(first, end)]
    modules = {f"{name}.{tag}" for name in ("_top", "compiled/_part") for tag in tags}
    for minor in range(first, end):
        library = folders / f"python3.{minor}/site-packages"
        found = {str(it.relative_to(library)) for it in library.rglob("*.*")}
        assert {it for it in found if it.endswith((".so", ".pyc"))} == modules
    assert [it.name for it in folders.iterdir() if not it.is_symlink()] == [f"python3.{first}"]
    assert [it.name for it in (package / "opt/ebpflb/bin").iterdir()] == ["ebpflb"]
    lock = (package.parent / "lock").read_text()
    assert lock == "compiled-one==2.0 \\\n    --hash=a\n"


def test_the_rpm_has_the_same_tree(package: Path) -> None:
    """The RPM lists every file and no others, and needs the same Python versions. Only zsh's
    completion is in another place.
    """
    rpm = package.parent / "rpm"
    spec = (DEPLOY / "release/package/ebpflb.spec").read_text()
    listed = re.findall(r"(?m)^(?:%dir |%config\(noreplace\) )?(/\S+)$", spec)
    files = {f"/{it.relative_to(rpm)}" for it in rpm.rglob("*") if it.is_symlink() or it.is_file()}
    whole = ("/opt/ebpflb/", "/usr/share/doc/ebpflb/")
    assert {it for it in files if not it.startswith(whole)} <= set(listed)
    assert all((rpm / it[1:]).exists() or (rpm / it[1:]).is_symlink() for it in listed)
    debian = {f"/{it.relative_to(package)}" for it in package.rglob("*")}
    assert {it for it in files - debian if "/zsh/" not in it} == set()
    control = (package / "DEBIAN/control").read_text()
    asked = [re.findall(r"\bpython3\.(\d+)", text) for text in (control, spec)]
    assert (
        asked[0]
        == asked[1]
        == re.findall(r"cpython-3(\d+)", " ".join(sorted(it for it in files if "_top" in it)))
    )


def test_openvex_speaks_of_what_the_image_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reason is one of OpenVEX's, names a vulnerability once, and becomes a statement about
    each package in the image from that source.
    """
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    sbom = script("sbom")
    reasons = yaml.safe_load(sbom.REASONS.read_text())
    names = [name for reason in reasons for name in reason["names"]]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"CVE-\d{4}-\d{4,}|TEMP-\d{7}-[0-9A-F]{6}", it) for it in names)
    known = {"component_not_present", "vulnerable_code_not_present",
             "vulnerable_code_not_in_execute_path"}  # fmt: skip
    assert {reason["justification"] for reason in reasons} <= known
    packages = "libmount1\t2.41-1+b1\tutil-linux\nmount\t2.41-1\tutil-linux\nsed\t4.9\tsed\n"
    document = sbom.vex("0.1.1", packages * 2, reasons)
    assert document["timestamp"] == "2026-09-21T14:13:20+00:00"
    (util_linux,) = [it for it in reasons if it["package"] == "util-linux"]
    statements = document["statements"]
    assert [it["vulnerability"]["name"] for it in statements] == util_linux["names"]
    parts = [
        {"@id": "pkg:deb/debian/libmount1@2.41-1%2Bb1"},
        {"@id": "pkg:deb/debian/mount@2.41-1"},
    ]
    product = {"@id": "pkg:oci/ebpflb?tag=0.1.1", "subcomponents": parts}
    assert all(it["products"] == [product] for it in statements)
    assert all(it["status"] == "not_affected" and it["impact_statement"] for it in statements)
