# SPDX-License-Identifier: Apache-2.0
"""ClusterLoader2 (kubernetes/perf-tests) can measure the network programming latency of our agents.

In its pkg/prometheus/manifests a headless Service of its own, default/kube-proxy-service.yaml,
selects kube-proxy's pods, default/prometheus-serviceMonitorKubeProxy.yaml scrapes it, and the group
kube-proxy.rules of prometheus-rules.yaml makes the series that its measurement reads.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import histogram
from bench.histogram import PROGRAMMING
from ebpflb.config import config_file
from ebpflb.model.addresses import Family
from tests.deploy import helm, promql
from tests.deploy.helm import Object
from tests.serve import subjects
from tests.serve.kube_proxy_table import OURS

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
SERVICE: Any = {
    "metadata": {"namespace": "kube-system", "labels": {"k8s-app": "kube-proxy"}},
    "spec": {"ports": [{"port": 10249}], "selector": {"component": "kube-proxy"}},
}
MONITOR: Any = {"jobLabel": "k8s-app", "selector": {"matchLabels": {"k8s-app": "kube-proxy"}}}
QUANTILES = 0.99, 0.90, 0.50
RULE = "histogram_quantile({}, sum(rate({}_bucket[5m])) by (le))"


def values() -> Any:
    """Return the values that docs/metrics.md gives."""
    (found,) = re.findall(r"<!-- clusterloader2 -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    return yaml.safe_load(found)


def is_scraped(objects: list[Object], folder: Path) -> bool:
    """Whether its Service selects the agents' pods, and they listen at its port on each address."""
    daemon_set = helm.the("DaemonSet", objects)
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]
    file = folder / "config.conf"
    file.write_text(helm.the("ConfigMap", objects)["data"]["config.conf"])
    (port,) = SERVICE["spec"]["ports"]
    return (
        daemon_set["metadata"]["namespace"] == SERVICE["metadata"]["namespace"]
        and SERVICE["spec"]["selector"].items() <= labels.items()
        and daemon_set["spec"]["template"]["spec"]["hostNetwork"]
        and config_file.read(file).metrics_bind_address == f"0.0.0.0:{port['port']}"
    )


def test_agents_are_scraped_as_kube_proxy(tmp_path: Path) -> None:
    """With the values of docs/metrics.md they are, as job kube-proxy, and without any of them not;
    the DaemonSet selects its pods as before.
    """
    given = values()
    without = [{key: it for key, it in given.items() if key != left_out} for left_out in given]
    plain, named, *others = helm.render({}, given, *without)
    assert is_scraped(named, tmp_path)
    assert [it for it in (plain, *others) if is_scraped(it, tmp_path)] == []
    labels = SERVICE["metadata"]["labels"]
    assert MONITOR["selector"]["matchLabels"].items() <= labels.items()
    assert labels[MONITOR["jobLabel"]] == "kube-proxy"
    selectors = [helm.the("DaemonSet", it)["spec"]["selector"] for it in (plain, named)]
    assert selectors[0] == selectors[1]


def test_its_rules_answer_of_what_an_agent_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules ask for series, labels and buckets that kube-proxy and our agents have; each makes
    one series, so that the measurement finds three; and they are numbers once something changed.
    """
    made = subjects.everything(monkeypatch)
    made.programmed(Family.IPV4, [0.01] * 97 + [0.3])
    made.programmed(Family.IPV6, [0.01, 0.3])
    served = made.exposition().body.decode()
    row = OURS[PROGRAMMING]
    known = {f"{PROGRAMMING}_bucket": row.labels | {"le"}}
    assert [
        promql.labels(promql.parse(RULE.format(share, PROGRAMMING)), known) for share in QUANTILES
    ] == [frozenset()] * 3
    samples = histogram.samples(served, PROGRAMMING)
    assert sorted(samples.keys() - {"count", "sum", "+Inf"}, key=float) == [
        f"{bound:g}" for bound in row.buckets
    ]
    assert (samples["0.25"], samples["0.5"], samples["+Inf"]) == (98, 100, 100)
    found = [histogram.quantile(share, samples) for share in QUANTILES]
    assert found == pytest.approx([0.375, 0.25 * 90 / 98, 0.25 * 50 / 98])
