# SPDX-License-Identifier: Apache-2.0
"""Packages the chart with this version: as Helm does, and as an OCI layout for a registry.

    python deploy/release/chart.py VERSION FOLDER

Helm itself writes the time into its archive; here the same commit gives the same bytes.
SOURCE_DATE_EPOCH is the time of all files.
"""

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import yaml

CHART = Path(__file__).parents[1] / "chart/ebpflb"
_CONFIG = "application/vnd.cncf.helm.config.v1+json"
_CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def semantic(version: str) -> str:
    """The version as Helm writes it: "0.1.1.dev5+gabc" is "0.1.1-dev.5+gabc"."""
    return version.replace(".dev", "-dev.")


def metadata(version: str) -> dict[str, str]:
    """Chart.yaml with this version; appVersion is the tag of the image, where + is not allowed."""
    found: dict[str, str] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return {**found, "version": semantic(version), "appVersion": version.replace("+", "-")}


def packed(files: dict[str, bytes]) -> bytes:
    """A tar archive of these files, by name."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            member.mtime = int(os.environ["SOURCE_DATE_EPOCH"])
            archive.addfile(member, io.BytesIO(content))
    return whole.getvalue()


def chart(version: str) -> bytes:
    """What `helm package` makes."""
    left_out = {"Chart.yaml", ".helmignore"}
    paths = [it for it in CHART.rglob("*") if it.is_file() and it.name not in left_out]
    files = {f"ebpflb/{it.relative_to(CHART)}": it.read_bytes() for it in paths}
    files["ebpflb/Chart.yaml"] = yaml.safe_dump(metadata(version), sort_keys=False).encode()
    return gzip.compress(packed(files), mtime=0)


def layout(content: bytes, version: str) -> bytes:
    """An OCI layout as a tar archive, of what `helm push` sends to a registry."""
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"})}

    def blob(media: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        files[f"blobs/sha256/{digest}"] = data
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": blob(_CONFIG, _json(metadata(version))),
        "layers": [blob(_CONTENT, content)],
    }
    listed = blob(_MANIFEST, _json(manifest))
    tag = {"org.opencontainers.image.ref.name": semantic(version).replace("+", "_")}
    files["index.json"] = _json({"schemaVersion": 2, "manifests": [{**listed, "annotations": tag}]})
    return packed(files)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def main(version: str, folder: str) -> None:
    name = f"ebpflb-{semantic(version)}"
    content = chart(version)
    Path(folder, f"{name}.tgz").write_bytes(content)
    Path(folder, f"{name}-chart.oci.tar").write_bytes(layout(content, version))


if __name__ == "__main__":
    main(*sys.argv[1:])
