# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by Helm's own library."""

import copy
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebpflb.config import config_file
from ebpflb.options import Options, Paths, flags_of
from tests.config.files import KUBEADM
from tests.deploy import helm
from tests.deploy.helm import CHART, DEPLOY, MANIFESTS, Object, Refused, Values

DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())
EVERYTHING: Values = {
    "config": {"metricsBindAddress": "0.0.0.0:10249"},
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "apiServer": {"host": "192.0.2.1"},
    "ui": {"enabled": True},
    "nodeReadiness": "taint",
}
OTHERS: dict[str, Any] = {
    "image.digest": f"sha256:{'0' * 64}",
    "image.pullPolicy": "Always",
    "image.pullSecrets": ["one"],
    "apiServer.hosts": ["192.0.2.1:6443"],
    "config.clusterCIDR": "10.244.0.0/16",
    "config.detectLocalMode": "NodeCIDR",
    "config.healthzBindAddress": "127.0.0.1:10300",
    "config.metricsBindAddress": "[::]:10301",
    "packetPath": "flows",
    "nodePortSourceRanges": ["198.51.100.0/24", "2001:db8::/32"],
    "packetMark": "0x4000/0x4000",
    "mapSizes": {"flows": 1048576, "backends": 262144},
    "replyPath": "request-device",
    "fastForward": "auto",
    "externalIPs": "203.0.113.0/24,2001:db8::/32",
    "namespaces": ["default", "shop"],
    "services": "tier=web,stage in (test,canary)",
    "scheduler": "round-robin",
    "endpointHealth": "passive",
    "nodeReadiness": "condition",
    "serviceMetrics": "200,tier=web,stage in (test,canary)",
    "nodeLocalAddresses": "169.254.20.10,fd00:20::10",
    "loadBalancerUnknownPorts": "reject",
    "namespaceShare": 50,
    "shadow": True,
    "socketTranslation": "host",
    "audit": "report",
    "readyzBindAddress": "[::1]:10302",
    "extraArgs": ["--devices=eth*"],
    "cleanup": "kube-proxy",
    "podMonitor.interval": "15s",
    "nodeSelector.kubernetes.io/os": "other",
    "resources.requests.cpu": "1",
    "resources.requests.memory": "1Gi",
    "tolerations": [],
    "ui.resources": {"limits": {"memory": "256Mi"}},
    "ui.tokenSecret": "a-secret",
    "updateStrategy.type": "OnDelete",
    "podLabels": {"a": "b"},
    "podAnnotations": {"a": "b"},
    "podMonitor.labels": {"a": "b"},
    "prometheusRule.labels": {"a": "b"},
    "prometheusRule.repositoryURL": "https://git.example.org/ebpflb/",
}
KEYS = {"nodeSelector.kubernetes.io/os": ["nodeSelector", "kubernetes.io/os"]}


def leaves(values: Values, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that can be set, by its path."""
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def merged(values: Values, over: Values) -> Values:
    """As Helm merges them."""
    inner = {key: merged(values[key], it) for key, it in over.items() if isinstance(it, dict)}
    return {**values, **over, **inner}


def another(path: str, value: Any) -> Any:
    """One that is allowed there, and is not this one."""
    if path in OTHERS:
        return OTHERS[path]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value}x"


def with_(values: Values, path: str, value: Any) -> Values:
    """A copy in which this one is set."""
    made = inner = copy.deepcopy(values)
    *above, last = KEYS.get(path, path.split("."))
    for key in above:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return made


def probes(values: Values) -> list[Object]:
    (objects,) = helm.render(values)
    container = helm.container(objects)
    return [container[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness")]


def test_manifests_are_current() -> None:
    """deploy/manifests has what the chart makes of its default values."""
    assert MANIFESTS.read_text() == helm.plain(), "python -m tests.deploy.helm > " + str(MANIFESTS)


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"cleanup": "ebpflb"}, {"mountBpffs": True}])
def test_lint(values: Values) -> None:
    """Helm finds nothing to warn of."""
    (report,) = helm.ask("lint", values)
    assert not report["errors"]
    assert [it for it in report["messages"] if it["severity"] > 1] == []


@pytest.mark.extended
def test_every_value_is_used() -> None:
    """Whatever values.yaml offers makes a difference."""
    offered = dict(leaves(merged(DEFAULTS, EVERYTHING)))
    assert offered.keys() == dict(leaves(DEFAULTS)).keys()
    before = [EVERYTHING for _ in offered]
    after = [
        with_(values, path, another(path, offered[path]))
        for path, values in zip(offered, before, strict=True)
    ]
    rendered = helm.render(*before, *after)
    pairs = zip(rendered[: len(before)], rendered[len(before) :], strict=True)
    assert [path for path, (was, it) in zip(offered, pairs, strict=True) if it == was] == []


def test_options_of_the_chart() -> None:
    """Each value that an option names is one of the chart, and is handed on as that option."""
    template = (CHART / "templates" / "daemonset.yaml").read_text()
    declared = [flag for kind in (Options, Paths) for _, flag, _ in flags_of(kind)]
    for flag in declared:
        if flag.chart not in ("-", "extraArgs"):
            assert flag.chart in {*DEFAULTS, *dict(leaves(DEFAULTS))}
            assert re.search(rf"{flag.name}\b.*\.Values\.|{flag.name}[=\n]", template), flag.name


def test_values_that_an_older_chart_did_not_have() -> None:
    """With --reuse-values they are absent after an upgrade: the option is not given."""
    names = [name for name, value in DEFAULTS.items() if not isinstance(value, dict)]
    names.remove("readyzBindAddress")  # every chart has had it; its absence is refused
    for name, objects in zip(names, helm.render(*({it: None} for it in names)), strict=True):
        assert not [it for it in helm.container(objects)["args"] if it.endswith("=")], name
        assert "ValidatingAdmissionPolicy" not in {it["kind"] for it in objects}, name


def test_misspelt_values_are_refused() -> None:
    """At every level, but in the configuration, which ebpflb reads itself."""
    free = {"config", "resources", "nodeSelector", "updateStrategy", "podLabels", "podAnnotations"}
    sections = [key for key, v in DEFAULTS.items() if isinstance(v, dict) and key not in free]
    misspelt: list[dict[str, Any]] = [{"tolerationz": []}]
    misspelt += [{section: {"misspelt": 1}} for section in sections]
    answers = helm.ask("render", *misspelt)
    assert len(sections) >= 4
    for answer in answers:
        assert isinstance(answer, Refused)
        assert "not allowed" in str(answer)


@pytest.mark.parametrize(
    "values",
    [
        {"image": {"tag": "latest"}},
        {"image": {"digest": "sha256:abc"}},
        {"apiServer": {"host": "https://192.0.2.1:6443"}},
        {"apiServer": {"port": 0}},
        {"apiServer": {"hosts": ["192.0.2.1"]}},
        {"apiServer": {"hosts": "192.0.2.1:6443"}},
        {"config": {"kind": "KubeProxyConfiguration"}},
        {"config": {"healthzBindAddress": "10256"}},
        {"config": {"healthzBindAddress": "[::]"}},
        {"config": {"healthzBindAddress": "node:10256"}},
        {"config": {"metricsBindAddress": None}},
        {"rights": {"enterPods": "yes"}},
        {"cleanup": "everything"},
        {"cleanup": "kube-proxy", "shadow": True},
        {"cleanup": "kube-proxy", "namespaces": ["shop"]},
        {"cleanup": "kube-proxy", "services": "stage=canary"},
        {"podMonitor": {"enabled": True}},
        {"podMonitor": {"enabled": True}, "config": {"metricsBindAddress": ""}},
        {"podMonitor": {"enabled": True}, "config": {"metricsBindAddress": "::1"}},
    ],
)
def test_bad_values_are_refused(values: Values) -> None:
    """What cannot work is refused before anything is installed."""
    (answer,) = helm.ask("render", values)
    assert isinstance(answer, Refused)


def test_the_page_is_off_by_default_and_may_write_nothing() -> None:
    """Its container has the agent's rights at most, every mount but /tmp read-only, and no token of
    the service account.
    """
    ui = {"enabled": True, "port": 10300, "tokenSecret": "a-secret"}
    plain, rendered = helm.render({}, {"ui": ui})
    assert "ui" not in [it["name"] for it in helm.containers(plain)]
    agent, page = helm.containers(rendered)
    assert page["args"] == [
        *("ui", "--listen=127.0.0.1:10300", "--token-file=/etc/ebpflb-ui/token"),
    ]
    rights = [set(it["securityContext"]["capabilities"]["add"]) for it in (page, agent)]
    assert rights[0] <= rights[1] and page["securityContext"]["readOnlyRootFilesystem"]
    assert {it["name"] for it in page["volumeMounts"] if not it.get("readOnly")} == {"tmp"}
    places = {it["mountPath"]: it["name"] for it in page["volumeMounts"]}
    assert places["/var/run/secrets/kubernetes.io/serviceaccount"] == "no-token"
    assert {"name": "no-token", "emptyDir": {}} in helm.the("DaemonSet", rendered)["spec"][
        "template"
    ]["spec"]["volumes"]
    assert "hostPort" not in str(page)


def test_one_version() -> None:
    """Chart and manifests name the image that `make image` makes in any checkout, and no tag says
    "latest"; a release gives the chart the version that git has. No page names a version's files.
    """
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert f"image=${{IMAGE:-localhost/ebpflb:{version}}}$" in (DEPLOY / "image/build").read_text()
    assert f"image: localhost/ebpflb:{version}\n" in MANIFESTS.read_text()
    for page in (*(DEPLOY.parent / "docs").glob("*.md"), DEPLOY.parent / "README.md"):
        assert not re.search(r"ebpflb[-_:]\d", page.read_text()), page
    for path in DEPLOY.rglob("*.y*ml"):
        assert ":latest" not in path.read_text(), path


def test_image() -> None:
    """A digest wins over a tag."""
    image = {"repository": "example.org/ebpflb", "tag": "1"}
    digest = OTHERS["image.digest"]
    tagged, pinned = helm.render({"image": image}, {"image": image | {"digest": digest}})
    assert helm.container(tagged)["image"] == "example.org/ebpflb:1"
    assert helm.container(pinned)["image"] == f"example.org/ebpflb@{digest}"


@pytest.mark.parametrize(
    ("bound", "host", "port"),
    [
        ("0.0.0.0:10256", None, 10256),
        ("[::]:10300", None, 10300),
        ("127.0.0.1:10256", "127.0.0.1", 10256),
        ("[fd00::1]:10256", "fd00::1", 10256),
        ("", None, 10256),
        ("0.0.0.0", None, 10256),
        ("::", None, 10256),
        ("192.0.2.1", "192.0.2.1", 10256),
        ("fd00::1", "fd00::1", 10256),
    ],
)
def test_probes_follow_the_configuration(bound: str, host: str | None, port: int) -> None:
    """The kubelet asks where the agent listens."""
    live, ready = probes({"config": {"healthzBindAddress": bound}})
    assert (live["path"], live.get("host"), live["port"]) == ("/livez", host, port)
    assert (ready["path"], ready["host"], ready["port"]) == ("/readyz", "127.0.0.1", 10247)


def test_readiness_is_asked_of_the_agent_alone() -> None:
    """Not at the port that a kube-proxy on the same node has too; the agent listens there."""
    bound = "127.0.0.1:10300"
    (objects,) = helm.render({"readyzBindAddress": bound})
    container = helm.container(objects)
    asked = container["readinessProbe"]["httpGet"]
    assert (asked["path"], asked["host"], asked["port"]) == ("/readyz", "127.0.0.1", 10300)
    assert f"--readyz-bind-address={bound}" in container["args"]


def test_what_kubeadm_wrote(tmp_path: Path) -> None:
    """Its ConfigMap is taken for ``config`` as it is, and read as it was (docs/install.md)."""
    whole = yaml.safe_load(KUBEADM.read_text())
    outer = ("apiVersion", "kind", "clientConnection")
    (objects,) = helm.render({"config": {k: v for k, v in whole.items() if k not in outer}})
    installed, written = tmp_path / "config.conf", tmp_path / "kubeadm.conf"
    installed.write_text(helm.the("ConfigMap", objects)["data"]["config.conf"])
    written.write_text(yaml.safe_dump({**whole, "clientConnection": {}}))
    assert config_file.read(installed) == config_file.read(written)
    assert helm.container(objects)["livenessProbe"]["httpGet"]["port"] == 10256


def test_api_server() -> None:
    """An address that needs no Service takes the place of the one that the kubelet names."""
    plain, named = helm.render({}, {"apiServer": {"host": "192.0.2.1"}})
    assert "KUBERNETES_SERVICE_HOST" not in {it["name"] for it in helm.container(plain)["env"]}
    found = {it["name"]: it.get("value") for it in helm.container(named)["env"]}
    assert found["KUBERNETES_SERVICE_HOST"] == "192.0.2.1"
    assert found["KUBERNETES_SERVICE_PORT"] == "6443"


def test_several_api_servers() -> None:
    """They reach the agent as options, and the kubelet's frontend cannot be chosen here."""
    (objects,) = helm.render({"apiServer": {"hosts": ["192.0.2.1:6443", "[2001:db8::1]:6443"]}})
    given = [it for it in helm.container(objects)["args"] if "api-server" in it]
    assert given == ["--api-server=192.0.2.1:6443", "--api-server=[2001:db8::1]:6443"]


def test_bpffs_is_mounted_for_the_host() -> None:
    """Only the init container that mounts is privileged, and what it mounts is the host's."""
    (objects,) = helm.render({"mountBpffs": True})
    pod = helm.the("DaemonSet", objects)["spec"]["template"]["spec"]
    (mounting,) = pod["initContainers"]
    assert mounting["securityContext"]["privileged"]
    assert mounting["volumeMounts"][0]["mountPropagation"] == "Bidirectional"
    assert "privileged" not in helm.container(objects)["securityContext"]


def cleaning_container(objects: list[Object]) -> Object:
    (found,) = helm.the("DaemonSet", objects)["spec"]["template"]["spec"]["initContainers"]
    return dict(found)


@pytest.mark.parametrize("status", [0, 1])
def test_the_agent_starts_whatever_the_cleanup_of_kube_proxy_meets(
    tmp_path: Path, status: int
) -> None:
    """Its init container calls `ebpflb cleanup --kube-proxy`, and succeeds all the same if that
    does not; then its log says so.
    """
    (objects,) = helm.render({"cleanup": "kube-proxy"})
    command = cleaning_container(objects)["command"]
    ebpflb = tmp_path / "ebpflb"
    ebpflb.write_text(f'#!/bin/sh\necho "called with $*"\nexit {status}\n')
    ebpflb.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    assert done.stdout == "called with cleanup --kube-proxy\n"
    not_done = "kube-proxy is not cleaned up on this node; the agent starts all the same\n"
    assert done.stderr == (not_done if status else "")


def test_notes_say_when_to_set_the_cleanup_back() -> None:
    """Only where it is set; the command sets it back."""
    plain, cleaning = (
        files["ebpflb/templates/NOTES.txt"]
        for files in helm.ask("render", {}, {"cleanup": "kube-proxy"})
    )
    assert "--set cleanup=\n" in cleaning and "-c cleanup" in cleaning
    assert "cleanup=" not in plain


@pytest.mark.parametrize(("cleanup", "serves"), [("kube-proxy", True), ("ebpflb", False)])
def test_cleanup(cleanup: str, serves: bool) -> None:
    """It is done before the agent starts, or in its place, with sight of all it has to remove."""
    (objects,) = helm.render({"cleanup": cleanup})
    cleaning = cleaning_container(objects)
    assert serves or cleaning["args"] == ["cleanup"]
    assert cleaning["volumeMounts"] == helm.container(objects)["volumeMounts"]
    assert ("args" in helm.container(objects)) == serves
    raw = [cleanup == "kube-proxy", True]  # of the agent by rights.resetClients
    for each, wanted in zip((cleaning, helm.container(objects)), raw, strict=True):
        assert ("NET_RAW" in each["securityContext"]["capabilities"]["add"]) == wanted


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodeHealth": {"enabled": True}}, "nodeHealth was removed"),
        ({"endpointHealth": "nodes"}, "endpointHealth: nodes was removed; use passive"),
        ({"packetPath": "flows", "fastForward": True}, "the flow tables have no fast path"),
        ({"packetPath": "flows", "fastForward": "auto"}, "the flow tables have no fast path"),
    ],
)
def test_a_removed_value_is_refused_with_a_sentence(values: Values, words: str) -> None:
    with pytest.raises(Refused, match=words):
        helm.render(values)
