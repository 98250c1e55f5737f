# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/migration.md do what it says, where that needs no cluster."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ebpflb.configuration import config_file
from tests.deploy import helm

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/migration.md"
KUBEADM = HERE.parent / "configuration/kubeadm.yaml"
KUBECTL = Path(sys.executable).with_name("kubectl")
DAEMON_SET = """
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      nodeSelector: {kubernetes.io/os: linux}
      containers: [{name: kube-proxy, image: kube-proxy}]
"""


def commands(name: str) -> str:
    """The block of the page that has this name."""
    (found,) = re.findall(rf"<!-- {name} -->\n *```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def test_values(tmp_path: Path) -> None:
    """What it makes of a kubeadm cluster's kube-proxy the chart takes, and ebpflb reads."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\ncat {KUBEADM}\n")
    kubectl.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", commands("values")], cwd=tmp_path, env=path, check=True)
    (objects,) = helm.render(yaml.safe_load((tmp_path / "values.yaml").read_text()))
    said = tmp_path / "config.conf"
    said.write_text(helm.the("ConfigMap", objects)["data"]["config.conf"])
    found = config_file.read(said)
    assert not found.errors
    assert found.configuration.cluster_cidr == "10.244.0.0/16"
    assert found.configuration.client_connection.kubeconfig == ""
    env = {it["name"]: it.get("value") for it in helm.container(objects)["env"]}
    assert env["KUBERNETES_SERVICE_HOST"] == "10.0.0.10"


def test_patch(tmp_path: Path) -> None:
    """The patch ties kube-proxy to nodes without the label, and keeps what it was tied to."""
    manifest = tmp_path / "daemonset.yaml"
    manifest.write_text(DAEMON_SET)
    (line,) = [line for line in commands("patch").splitlines() if "patch" in line]
    (patch,) = re.findall(r"--patch='(.*)'", line)
    words = ["patch", "--local", "-f", str(manifest), "--type=merge", f"--patch={patch}", "-o=yaml"]
    done = subprocess.run([KUBECTL, *words], capture_output=True, text=True, check=True)
    spec = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": "ebpflb", "operator": "DoesNotExist"}]}
    ]


@pytest.mark.parametrize("kubelet", ["10.0.0.10:10250", "[fd00::10]:10250"])
def test_scrape_job(kubelet: str) -> None:
    """What Prometheus makes of a node is that node's metrics, in a job of kube-proxy's name."""
    (job,) = yaml.safe_load(commands("scrape"))
    assert job["job_name"] == "kube-proxy"
    (rule,) = [it for it in job["relabel_configs"] if it["target_label"] == "__address__"]
    found = re.fullmatch(rule["regex"], kubelet)
    assert rule["source_labels"] == ["__address__"]
    assert found and rule["replacement"] == "$1:10249"
    assert found[1] == kubelet.removesuffix(":10250")
