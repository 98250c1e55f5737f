# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/migration.md do what the page says, as far as this needs no cluster."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ebpflb.config import config_file
from tests.deploy import helm

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/migration.md"
KUBEADM = HERE.parent / "config/kubeadm.yaml"
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
    """Return the page's code block of this name."""
    (found,) = re.findall(rf"<!-- {name} -->\n *```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def test_chart_and_ebpflb_accept_the_values(tmp_path: Path) -> None:
    """The chart and ebpflb accept the values made from a kubeadm cluster's kube-proxy."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\ncat {KUBEADM}\n")
    kubectl.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", commands("values")], cwd=tmp_path, env=path, check=True)
    (objects,) = helm.render(yaml.safe_load((tmp_path / "values.yaml").read_text()))
    said = tmp_path / "config.conf"
    said.write_text(helm.the("ConfigMap", objects)["data"]["config.conf"])
    found = config_file.read(said)
    assert found.cluster_cidr == "10.244.0.0/16"
    assert found.client_connection.kubeconfig == ""
    env = {it["name"]: it.get("value") for it in helm.container(objects)["env"]}
    assert env["KUBERNETES_SERVICE_HOST"] == "10.0.0.10"


@pytest.mark.parametrize(("block", "label"), [("patch", "ebpflb"), ("leave", "ebpflb-leaves")])
def test_the_patch_keeps_labelled_nodes_out(tmp_path: Path, block: str, label: str) -> None:
    """The patch restricts a DaemonSet to nodes without the label, and keeps its selector."""
    manifest = tmp_path / "daemonset.yaml"
    manifest.write_text(DAEMON_SET)
    (line,) = [line for line in commands(block).splitlines() if "patch" in line]
    (patch,) = re.findall(r"--patch='(.*)'", line)
    words = ["patch", "--local", "-f", str(manifest), "--type=merge", f"--patch={patch}", "-o=yaml"]
    done = subprocess.run([KUBECTL, *words], capture_output=True, text=True, check=True)
    spec = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": label, "operator": "DoesNotExist"}]}
    ]


STEPS = [
    ("shadow", [["--shadow"]], {}),
    ("node", [["--namespaces=shop"]], {"ebpflb-trial": "yes"}),
    ("nodes", [["--namespaces=shop"], ["--namespaces=shop,web"]], {}),
]


@pytest.mark.parametrize(("name", "wanted", "nodes"), STEPS, ids=[name for name, *_ in STEPS])
def test_a_little_at_a_time(
    tmp_path: Path, name: str, wanted: list[list[str]], nodes: dict[str, str]
) -> None:
    """Each step sets the agent's options for its own nodes only."""
    for tool, script in (("helm", 'printf "%s\\n" "$*" >> said'), ("kubectl", "true")):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / tool).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = commands("step") + commands(name)
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=path, check=True)
    plain, *stepped = helm.render({}, *map(set_by, (tmp_path / "said").read_text().splitlines()))
    usual = helm.container(plain)["args"]
    assert [[it for it in helm.container(o)["args"] if it not in usual] for o in stepped] == wanted
    pods = [helm.the("DaemonSet", objects)["spec"]["template"]["spec"] for objects in stepped]
    assert all(pod["nodeSelector"].items() >= nodes.items() for pod in pods)
    assert all(("ebpflb-trial" in pod["nodeSelector"]) == bool(nodes) for pod in pods)


def set_by(words: str) -> helm.Values:
    """Return the values that these words of `helm upgrade` set, without those of a file."""
    values: helm.Values = {}
    for word in re.findall(r"--set (\S+)", words):
        path, _, text = word.partition("=")
        listed = text[1:-1].split(",") if text.startswith("{") else None
        section, _, key = path.partition(".")
        value = listed or (text == "true") or text
        values[section] = {**values.get(section, {}), key: value} if key else value
    return values


def test_readme_installs_on_one_node_and_removes(tmp_path: Path) -> None:
    """The first block sets image, API server and pods' network; the second one cleans up."""
    readme = (PAGE.parents[1] / "README.md").read_text()
    script = "".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))
    for tool in ("buildah", "helm", "kubectl", "make"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho {tool} "$@" >> said\n')
        (tmp_path / tool).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=path, check=True)
    said = (tmp_path / "said").read_text().splitlines()
    (install,) = [set_by(it) for it in said if it.startswith("helm install")]
    (upgrade,) = [set_by(it) for it in said if it.startswith("helm upgrade")]
    installed, removing = helm.render(install, {**install, **upgrade})
    pod = helm.the("DaemonSet", installed)["spec"]["template"]["spec"]
    agent = helm.container(installed)
    assert pod["nodeSelector"]["ebpflb-trial"] == "yes"
    assert f"buildah push localhost/ebpflb:dev docker://{agent['image']}" in said
    assert {"name": "KUBERNETES_SERVICE_HOST", "value": "192.0.2.10"} in agent["env"]
    config = helm.the("ConfigMap", installed)["data"]["config.conf"]
    assert yaml.safe_load(config)["clusterCIDR"] == "10.244.0.0/16"
    (cleaning,) = helm.the("DaemonSet", removing)["spec"]["template"]["spec"]["initContainers"]
    assert cleaning["args"] == ["cleanup"]


def test_a_pod_is_ready_after_its_cleanup(tmp_path: Path) -> None:
    """A pod is ready only after its cleanup, so the roll-out does not end earlier."""
    install = PAGE.with_name("install.md").read_text()
    (block,) = re.findall(r"<!-- remove -->\n```sh\n(.*?)```", install, re.DOTALL)
    (patch,) = re.findall(r"--patch='(.*?)'", block, re.DOTALL)
    objects = yaml.safe_load_all((PAGE.parents[1] / "deploy/manifests/ebpflb.yaml").read_text())
    manifest = tmp_path / "daemonset.yaml"
    manifest.write_text(yaml.safe_dump(helm.the("DaemonSet", list(objects))))
    words = ["patch", "--local", "-f", str(manifest), "--type=json", f"--patch={patch}", "-o=yaml"]
    done = subprocess.run([KUBECTL, *words], capture_output=True, text=True, check=True)
    (container,) = yaml.safe_load(done.stdout)["spec"]["template"]["spec"]["containers"]
    script = container["command"][2]
    marker = container["readinessProbe"]["exec"]["command"][2]
    assert script.index("ebpflb cleanup") < script.index(f"touch {marker}")
    assert container["readinessProbe"].keys() == {"exec", "periodSeconds"} | (
        container["readinessProbe"].keys() & {"timeoutSeconds"}
    )
    assert "livenessProbe" not in container
    assert marker.startswith("/tmp/") and "/tmp" in {
        mount["mountPath"] for mount in container["volumeMounts"]
    }


LIVE = {  # what kubectl says, with what the API server refuses in new objects
    "daemonset": """\
apiVersion: v1
kind: List
metadata: {resourceVersion: ""}
items:
- apiVersion: apps/v1
  kind: DaemonSet
  metadata:
    creationTimestamp: "2026-11-22T04:12:05Z"
    name: kube-proxy
    resourceVersion: "12"
    uid: 1b2c
- apiVersion: v1
  kind: ConfigMap
  metadata:
    name: kube-proxy
    resourceVersion: "13"
    uid: 1b2d
""",
    "clusterrolebinding": """\
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: kubeadm:node-proxier
  resourceVersion: "14"
  uid: 1b2e
""",
}


def test_the_backup_can_be_applied(tmp_path: Path) -> None:
    """The backup has all three objects as separate documents, and can be applied."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f"#!/bin/sh\ncase \"$*\" in *daemonset*) cat <<'E'\n{LIVE['daemonset']}E\n;;"
        f" *) cat <<'E'\n{LIVE['clusterrolebinding']}E\n;; esac\n"
    )
    kubectl.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", commands("backup")], cwd=tmp_path, env=path, check=True)
    text = (tmp_path / "kube-proxy-backup.yaml").read_text()
    listed, binding = yaml.safe_load_all(text)
    kinds = [it["kind"] for it in (*listed["items"], binding)]
    assert kinds == ["DaemonSet", "ConfigMap", "ClusterRoleBinding"]
    for it in (*listed["items"], binding):
        assert it["metadata"].keys() == {"name"}
