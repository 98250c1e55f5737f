# SPDX-License-Identifier: Apache-2.0
"""The chart, rendered by Helm's own library."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebpflb.options import Options, Paths, flags_of
from tests.config.page import chart_value
from tests.deploy import helm
from tests.deploy.helm import CHART, DEPLOY, MANIFESTS, Object, Refused, Values
from tests.deploy.helm import EVERYTHING as EVERYTHING_FILE

DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())
EVERYTHING: Values = yaml.safe_load(EVERYTHING_FILE.read_text())


def leaves(values: Values, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that can be set, with its path."""
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def probes(values: Values) -> list[Object]:
    (objects,) = helm.render(values)
    container = helm.container(objects)
    return [container[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness")]


def test_renderings_are_current() -> None:
    """Both renderings, with default and with other values, are current: see `python -m
    tests.deploy.helm`.
    """
    for path, text in helm.snapshots().items():
        assert path.read_text() == text, path


def test_the_second_rendering_has_other_values() -> None:
    """The second rendering changes each value of values.yaml."""
    every, others = dict(leaves(DEFAULTS)), dict(leaves(EVERYTHING))
    same = {path for path, value in every.items() if others.get(path, value) == value}
    same -= {path for path in same if any(it.startswith(f"{path}.") for it in others)}
    assert same == {"cleanup", "updateStrategy.rollingUpdate.maxUnavailable"}


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"cleanup": "ebpflb"}])
def test_helm_has_no_warning(values: Values) -> None:
    (report,) = helm.ask("lint", values)
    assert not report["errors"]
    assert [it for it in report["messages"] if it["severity"] > 1] == []


def test_options_of_the_chart() -> None:
    """Each option that names a value of the chart gets that value."""
    template = (CHART / "templates" / "daemonset.yaml").read_text()
    declared = [flag for kind in (Options, Paths) for _, flag, _ in flags_of(kind)]
    for flag in declared:
        if (value := chart_value(flag)) not in ("-", "extraArgs"):
            assert value in {*DEFAULTS, *dict(leaves(DEFAULTS))}
            assert re.search(rf"{flag.name}\b.*\.Values\.|{flag.name}[=\n]", template), flag.name


def test_values_that_an_older_chart_did_not_have() -> None:
    """After an upgrade with --reuse-values new values are missing, and their options are not
    given.
    """
    names = [name for name, value in DEFAULTS.items() if not isinstance(value, dict)]
    names.remove("readyzBindAddress")  # every chart has had it; its absence is refused
    for name, objects in zip(names, helm.render(*({it: None} for it in names)), strict=True):
        assert not [it for it in helm.container(objects)["args"] if it.endswith("=")], name
        assert "ValidatingAdmissionPolicy" not in {it["kind"] for it in objects}, name


def test_defaults_that_an_older_chart_had() -> None:
    """After an upgrade with --reuse-values the defaults of removed values are there, and the
    AppArmor profile, without which the runtime's own forbids the agent to start, is missing.
    """
    older = {"rights": {"resetClients": True, "appArmorProfile": None}, "ui": {"enabled": True}}
    health = {"nodeHealth": {"enabled": False, "port": 10246, "secret": ""}}
    new, upgraded = helm.render({"ui": {"enabled": True}}, older | health)
    assert upgraded == new


def test_misspelt_values_are_refused() -> None:
    """Misspelt values are refused at every level, except in the configuration, which ebpflb reads
    itself.
    """
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
        {"apiServer": {"host": "https://192.0.2.1:6443"}},
        {"apiServer": {"hosts": ["192.0.2.1"]}},
        {"config": {"kind": "KubeProxyConfiguration"}},
        {"config": {"healthzBindAddress": "10256"}},
        {"config": {"metricsBindAddress": None}},
        {"rights": {"enterPods": "yes"}},
        {"cleanup": "everything"},
        {"cleanup": "kube-proxy", "shadow": True},
        {"cleanup": "kube-proxy", "namespaces": ["shop"]},
        {"podMonitor": {"enabled": True}},
        {"podMonitor": {"enabled": True}, "config": {"metricsBindAddress": ""}},
    ],
)
def test_bad_values_are_refused(values: Values) -> None:
    """Values that cannot work are refused before anything is installed."""
    (answer,) = helm.ask("render", values)
    assert isinstance(answer, Refused)


def test_one_version() -> None:
    """Chart and manifests name the image that `make image` makes in any checkout, and no tag says
    "latest"; a release gives the chart the version in git. No page names files of one version.
    """
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert f"image=${{IMAGE:-localhost/ebpflb:{version}}}$" in (DEPLOY / "image/build").read_text()
    assert f"image: localhost/ebpflb:{version}\n" in MANIFESTS.read_text()
    for page in (*(DEPLOY.parent / "docs").glob("*.md"), DEPLOY.parent / "README.md"):
        assert not re.search(r"ebpflb[-_:]\d", page.read_text()), page
    for path in DEPLOY.rglob("*.y*ml"):
        assert ":latest" not in path.read_text(), path


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
    """The kubelet probes the address where the agent listens."""
    live, ready = probes({"config": {"healthzBindAddress": bound}})
    assert (live["path"], live.get("host"), live["port"]) == ("/livez", host, port)
    assert (ready["path"], ready["host"], ready["port"]) == ("/readyz", "127.0.0.1", 10247)


def cleaning_container(objects: list[Object]) -> Object:
    (found,) = helm.the("DaemonSet", objects)["spec"]["template"]["spec"]["initContainers"]
    return dict(found)


@pytest.mark.parametrize("status", [0, 1])
def test_the_agent_starts_whatever_the_cleanup_of_kube_proxy_meets(
    tmp_path: Path, status: int
) -> None:
    """The init container `ebpflb cleanup --kube-proxy` succeeds even if the cleanup fails; then its
    log says so.
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


@pytest.mark.parametrize(("cleanup", "serves"), [("kube-proxy", True), ("ebpflb", False)])
def test_cleanup_sees_what_it_must_remove(cleanup: str, serves: bool) -> None:
    """Cleanup runs before the agent or instead of it, and sees everything that it must remove."""
    (objects,) = helm.render({"cleanup": cleanup})
    cleaning = cleaning_container(objects)
    assert serves or cleaning["args"] == ["cleanup"]
    assert cleaning["volumeMounts"] == helm.container(objects)["volumeMounts"]
    assert ("args" in helm.container(objects)) == serves
    raw = [cleanup == "kube-proxy", False]  # of iptables-legacy
    for each, wanted in zip((cleaning, helm.container(objects)), raw, strict=True):
        assert ("NET_RAW" in each["securityContext"]["capabilities"]["add"]) == wanted


def test_pools_ask_for_no_right_that_they_do_not_need() -> None:
    """Raw sockets and the right to write Services come with a pool; the list of namespaces with
    labels only. A hand-over needs raw sockets.
    """
    pools: list[list[str]] = [[], ["192.0.2.0/28"], ["192.0.2.0/28", "192.0.2.16/28@team=a"]]
    (handing,) = helm.render({"handOver": "auto"})
    assert "NET_RAW" in helm.container(handing)["securityContext"]["capabilities"]["add"]
    for number, objects in enumerate(helm.render(*({"l2Pools": it} for it in pools))):
        added = helm.container(objects)["securityContext"]["capabilities"]["add"]
        rules = helm.the("ClusterRole", objects)["rules"]
        granted = {resource for rule in rules for resource in rule["resources"]}
        assert ("NET_RAW" in added, "services/status" in granted) == (number > 0, number > 0)
        assert ("namespaces" in granted) == (number > 1)


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
