# SPDX-License-Identifier: Apache-2.0
"""Configuration files for tests."""

from pathlib import Path
from typing import Any

import yaml

KUBEADM = Path(__file__).parent / "kubeadm.yaml"  # as kubeadm writes it into its ConfigMap
HEAD = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
DECISIONS: list[dict[str, Any]] = yaml.load(
    Path(__file__).with_name("decisions.yaml").read_text(), yaml.CSafeLoader
)


def write(path: Path, **values: Any) -> Path:
    """Write a file with these fields."""
    path.write_text(yaml.safe_dump(HEAD | values))
    return path
