# SPDX-License-Identifier: Apache-2.0
"""What is imported of the Kubernetes client."""

import subprocess
import sys

_IMPORTED = """
import sys, ebpflb.cluster.api
print(*sys.modules)
import ebpflb.cluster.kubeconfig
from kubernetes.client import ApiClient
print(ApiClient.__module__)
"""


def test_a_pod_imports_no_more_than_it_uses() -> None:
    """Neither models nor OAuth; what a kubeconfig's loader asks for is there all the same."""
    code = [sys.executable, "-c", _IMPORTED]
    lines = subprocess.run(code, capture_output=True, text=True, check=True).stdout.splitlines()
    imported, found = lines[0].split(), lines[1]
    assert "kubernetes.config.incluster_config" in imported
    unused = {"kubernetes.client.models", "requests", "oauthlib", "pydantic"}
    assert unused.isdisjoint(imported)
    assert found == "kubernetes.client.api_client"
