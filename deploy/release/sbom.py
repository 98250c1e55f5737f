# SPDX-License-Identifier: Apache-2.0
"""Writes a CycloneDX SBOM beside each file of a release, and an OpenVEX document of the image.

    python deploy/release/sbom.py VERSION FOLDER IMAGE_PACKAGES

The Python packages come from the lock files, by cyclonedx-py; of the Debian packages and the image,
those that a Debian package contains: the same for each architecture. IMAGE_PACKAGES has the Debian
packages of the images, as `dpkg-query --show` prints them. Raises CalledProcessError if
cyclonedx-py fails.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

LOCKS = Path(__file__).parents[2] / "requirements"
REASONS = Path(__file__).with_name("vex.yaml")
# By the end of a file's name: its type.
KINDS = {
    ".whl": "library",
    ".tar.gz": "library",
    ".deb": "application",
    ".rpm": "application",
    "-image.oci.tar": "container",
    ".tgz": "application",
    "-chart.oci.tar": "application",
}

Bom = dict[str, Any]


def of_lock(name: str) -> Bom:
    """What a lock file pins, with the hashes."""
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible"]
    done = subprocess.run([*command, LOCKS / f"{name}.txt"], capture_output=True, check=True)
    bom: Bom = json.loads(done.stdout)
    return bom


def contained(folder: Path) -> Bom:
    """What the lock file pins and the Debian package contains."""
    package = min(folder.glob("*.deb"))
    listing = subprocess.run(["dpkg-deb", "--contents", package], capture_output=True, check=True)
    there = set(
        re.findall(r"/site-packages/([^/]+)-[^/-]+\.dist-info/$", listing.stdout.decode(), re.M)
    )
    names = {it.lower().replace("_", "-") for it in there}
    bom = of_lock("ui")
    bom["components"] = [it for it in bom["components"] if it["name"] in names]
    kept = {it["bom-ref"] for it in bom["components"]}
    bom["dependencies"] = [it for it in bom["dependencies"] if it["ref"] in kept]
    return bom


def debian(packages: str) -> list[Bom]:
    """A component for each line of packages; the architectures have most in common."""
    lines = [line.split("\t") for line in sorted(set(packages.splitlines()))]
    return [
        _component("library", name, version, f"deb/debian/{name}") for name, version, _ in lines
    ]


def vex(version: str, packages: str, reasons: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an OpenVEX document: each reason in vex.yaml, with the packages it applies to."""
    lines = [line.split("\t") for line in sorted(set(packages.splitlines()))]
    statements = []
    for reason in reasons:
        of_source = [line[:2] for line in lines if line[2] == reason["package"]]
        parts = [{"@id": f"pkg:deb/debian/{name}@{_quoted(number)}"} for name, number in of_source]
        about = {
            "products": [{"@id": f"pkg:oci/ebpflb?tag={version}", "subcomponents": parts}],
            "status": "not_affected",
            "justification": reason["justification"],
            "impact_statement": reason["impact"],
        }
        statements += [{"vulnerability": {"name": it}, **about} for it in reason["names"] if parts]
    time = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    return {
        "@context": "https://openvex.dev/ns/v0.2.0",
        "@id": f"https://openvex.dev/docs/public/ebpflb-{version}",
        "author": "The ebpflb authors",
        "timestamp": time.isoformat(),
        "version": 1,
        "statements": statements,
    }


def _component(kind: str, name: str, version: str, package: str) -> Bom:
    purl = f"pkg:{package}@{_quoted(version)}"
    return {"type": kind, "name": name, "version": version, "purl": purl, "bom-ref": purl}


def _quoted(version: str) -> str:
    return quote(version, safe="~:")


def of_file(path: Path, version: str, packages: str) -> Bom:
    """The SBOM of one file of a release."""
    (kind,) = [kind for end, kind in KINDS.items() if path.name.endswith(end)]
    bom = of_lock("run") if kind == "library" else contained(path.parent)
    if kind == "container":
        bom["components"] += debian(packages)
    if path.suffix == ".tgz" or "chart" in path.name:
        bom["components"], bom["dependencies"] = [], []
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    subject = _component(kind, "ebpflb", version, "generic/ebpflb")
    subject["hashes"] = [{"alg": "SHA-256", "content": digest}]
    bom["metadata"]["component"] = subject
    return bom


def main(version: str, folder: str, packages: str) -> None:
    listed, reasons = Path(packages).read_text(), yaml.safe_load(REASONS.read_text())
    image = version.replace("+", "-")
    document = json.dumps(vex(image, listed, reasons), indent=1)
    Path(folder, f"ebpflb-{version}-image.openvex.json").write_text(document)
    paths = [it for it in Path(folder).iterdir() if it.name.endswith(tuple(KINDS))]
    for path in paths:
        bom = of_file(path, version, listed)
        path.with_name(f"{path.name}.cdx.json").write_text(json.dumps(bom, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
