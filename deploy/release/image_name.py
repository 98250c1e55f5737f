# SPDX-License-Identifier: Apache-2.0
"""Names the image of an OCI layout for those who load it without a registry.

    python deploy/release/image_name.py LAYOUT NAME

buildah writes the tag alone, of which podman makes localhost/0.1.0, and containerd
import-DATE:0.1.0.
"""

import json
import sys
from pathlib import Path


def give_name(layout: Path, name: str) -> None:
    """Adds the annotation that podman, containerd and Docker read; the layout has one image."""
    index = layout / "index.json"
    listed = json.loads(index.read_text())
    (image,) = listed["manifests"]
    image["annotations"]["io.containerd.image.name"] = name
    index.write_text(json.dumps(listed))


if __name__ == "__main__":
    give_name(Path(sys.argv[1]), sys.argv[2])
