# SPDX-License-Identifier: Apache-2.0
"""What is imported of the Kubernetes client."""

import subprocess
import sys

_IMPORTED = """
import sys, ebpflb.cluster.api
print(*sys.modules)
import ebpflb.cluster.kubeconfig
print(*sys.modules)
from kubernetes.config import kube_config
print(type(kube_config.ApiClient()).__module__)
print(type(kube_config.OAuth2Session()).__module__)
print(kube_config.oauthlib.oauth2.rfc6749.errors.InvalidClientIdError.__name__)
"""


def test_no_more_is_imported_than_is_used() -> None:
    """Neither models nor OAuth; what renews tokens of OpenID Connect is there when asked for."""
    code = [sys.executable, "-c", _IMPORTED]
    lines = subprocess.run(code, capture_output=True, text=True, check=True).stdout.splitlines()
    in_pod, by_kubeconfig = lines[0].split(), lines[1].split()
    assert "kubernetes.config.incluster_config" in in_pod
    unused = {"kubernetes.client.models", "requests", "pydantic", "oauthlib.oauth2.rfc6749"}
    assert unused.isdisjoint(in_pod)
    assert "kubernetes.config.kube_config" in by_kubeconfig
    assert unused.isdisjoint(by_kubeconfig)
    assert lines[2:4] == ["kubernetes.client.api_client", "requests_oauthlib.oauth2_session"]
    assert lines[4] == "InvalidClientIdError"
