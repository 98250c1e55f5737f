# SPDX-License-Identifier: Apache-2.0
"""The installed objects are valid for every supported Kubernetes, and request no unused rights."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebpflb.cli.run import run
from ebpflb.cluster import api, event_recorder
from ebpflb.config import config_file
from ebpflb.kernel.maps.state_dir import BPFFS
from ebpflb.kernel.node import sysctls
from ebpflb.options import Paths
from tests.deploy import helm
from tests.deploy.helm import DEPLOY, Object, Values

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
VARIANTS: list[Values] = [
    {},
    {"apiServer": {"host": "192.0.2.1"}, "rights": {"lockMemory": False, "enterPods": False}},
    {"mountBpffs": True, "cleanup": "kube-proxy", "podLabels": {"a": "b"}},
    {"cleanup": "ebpflb", "image": {"pullSecrets": ["one"]}},
    {
        "config": {"metricsBindAddress": "0.0.0.0:10301"},
        "podMonitor": {"enabled": True, "job": "kube-proxy", "labels": {"a": "b"}},
        "prometheusRule": {
            "enabled": True,
            "labels": {"a": "b"},
            "repositoryURL": "https://git.example.org/ebpflb/",
        },
    },
]
OPERATOR_KINDS = ("PodMonitor", "PrometheusRule")


@pytest.fixture(scope="module")
def watched() -> list[Object]:
    """Return the objects for a cluster with the Prometheus operator."""
    return helm.render(VARIANTS[-1])[0]


@pytest.fixture(scope="module")
def variants() -> list[list[Object]]:
    """Return the chart's objects for each set of values in VARIANTS."""
    return helm.render(*VARIANTS)


@pytest.fixture(scope="module")
def validator() -> Any:
    """Return the package; importing it takes two seconds in every process that collects tests."""
    import kubernetes_validate

    return kubernetes_validate


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_by_the_strict_schema(
    version: str, variants: list[list[Object]], validator: Any
) -> None:
    """Every object is valid by the strict schema of every Kubernetes that the chart supports."""
    for objects in variants:
        for it in objects:
            if it["kind"] not in OPERATOR_KINDS:
                validator.validate(it, version, strict=True)


def check(it: Object) -> None:
    """Check by the schema of the Prometheus operator's CRD, which is a type in Python. Raises
    ValueError.
    """
    from cloudcoil.models.prometheus_operator import v1 as operators  # takes seconds

    read = getattr(operators, it["kind"]).model_validate(it)
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == it, "unknown fields"


@pytest.mark.parametrize("kind", OPERATOR_KINDS)
def test_schema_of_the_operator(kind: str, watched: list[Object]) -> None:
    """The operator's objects are valid too, and have no unknown field."""
    check(helm.the(kind, watched))


def test_prometheus_finds_the_metrics(watched: list[Object]) -> None:
    """The agents' pods are selected, and the named port is the one where /metrics is served."""
    pod = helm.the("DaemonSet", watched)["spec"]["template"]
    spec = helm.the("PodMonitor", watched)["spec"]
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    ports = helm.container(watched)["ports"]
    assert ports == [{"name": endpoint["port"], "containerPort": 10301}]
    named = {it["targetLabel"]: it.get("replacement") for it in endpoint["relabelings"]}
    assert named == {"node": None, "job": "kube-proxy"}


def test_rules_are_the_alerts(watched: list[Object]) -> None:
    """All alerts are there, in the words that test_observability checks, except for the links,
    which begin with the value repositoryURL.
    """
    text = (DEPLOY / "prometheus/alerts.yaml").read_text()
    links = text.replace("docs/runbook.md#", "https://git.example.org/ebpflb/docs/runbook.md#")
    alerts = yaml.safe_load(links)
    assert links != text
    assert helm.the("PrometheusRule", watched)["spec"] == alerts


def test_rights_in_the_cluster(defaults: list[Object]) -> None:
    """The agent's account may list, watch and write what the agent does, and nothing else."""
    read = {(group_of(path), path.rsplit("/", 1)[1]) for path in api.API_PATHS.values()}
    wanted = {it: {"list", "watch"} for it in read}
    methods = re.findall(r'"(GET|POST|PUT|PATCH|DELETE)"', inspect.getsource(api))
    assert set(methods) == {"GET", "POST", "PATCH"}  # PATCH: only with nodeReadiness or l2Pools
    told = event_recorder.Event(
        event_recorder.node("node"), "Normal", "Starting", "StartKubeProxy", ""
    )
    path, _body = event_recorder.manifest(told, "node", 0)
    wanted[group_of(path), path.rsplit("/", 1)[1]] = {"create"}
    granted: dict[tuple[str, str], set[str]] = {}
    for rule in helm.the("ClusterRole", defaults)["rules"]:
        assert rule.keys() == {"apiGroups", "resources", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                granted[group, resource] = set(rule["verbs"])
    assert granted == wanted
    binding = helm.the("ClusterRoleBinding", defaults)
    account = helm.the("ServiceAccount", defaults)["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert binding["roleRef"]["name"] == helm.the("ClusterRole", defaults)["metadata"]["name"]


def group_of(path: str) -> str:
    parts = path.strip("/").split("/")
    return parts[1] if parts[0] == "apis" else ""


def test_agent_knows_its_flags(defaults: list[Object]) -> None:
    """Every flag in the manifests is a flag of `ebpflb run`."""
    command, *flags = helm.container(defaults)["args"]
    assert command == run.name
    known = {option for parameter in run.params for option in parameter.opts}
    assert {flag.partition("=")[0] for flag in flags} <= known


@pytest.mark.parametrize("place", ["the manifests", "the machine"])
def test_configuration_is_read(
    place: str, defaults: list[Object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ebpflb's own reader finds no wrong, unknown or duplicate field in the configuration."""
    path = DEPLOY / "systemd/config.conf"
    if place == "the manifests":
        path = tmp_path / "config.conf"
        path.write_text(helm.the("ConfigMap", defaults)["data"]["config.conf"])
    config_file.read(path)
    assert not caplog.messages


def test_directories_are_those_of_the_node(defaults: list[Object]) -> None:
    """Pins, lock, cache, sysctls and configuration are directories of the node."""
    container = helm.container(defaults)
    volumes = helm.the("DaemonSet", defaults)["spec"]["template"]["spec"]["volumes"]
    host = {it["name"]: it["hostPath"]["path"] for it in volumes if "hostPath" in it}
    found = {it["mountPath"]: host.get(it["name"]) for it in container["volumeMounts"]}
    paths = Paths()
    for path in (BPFFS, paths.run, paths.cache, Path("/run/netns"), Path("/sys/fs/cgroup")):
        assert found.pop(str(path)) == str(path)
    assert found.pop(str(sysctls.HOST / "net")) == str(sysctls.OWN_PROC_SYS / "net")
    assert found == {"/etc/ebpflb": None, "/tmp": None}
    propagated = {it["name"] for it in container["volumeMounts"] if "mountPropagation" in it}
    assert propagated == {"bpffs", "netns"}
