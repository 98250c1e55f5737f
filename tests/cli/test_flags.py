# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's flags in all of Go's notations, and the resulting configuration."""

from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ebpflb.cli import run_options
from ebpflb.config import fields, parameters
from ebpflb.config.fields import KubeProxyConfiguration
from ebpflb.config.parameters import PARAMETERS, Parameter

# kube-proxy.md 15, flag by flag
DOCUMENTED = """
config write-config-to cleanup init-only kubeconfig master kube-api-content-type kube-api-qps
kube-api-burst hostname-override bind-address healthz-bind-address metrics-bind-address healthz-port
metrics-port bind-address-hard-fail profiling show-hidden-metrics-for-version feature-gates
proxy-mode detect-local-mode cluster-cidr pod-bridge-interface pod-interface-name-prefix
nodeport-addresses masquerade-all iptables-masquerade-bit iptables-localhost-nodeports
iptables-sync-period ipvs-sync-period iptables-min-sync-period ipvs-min-sync-period
config-sync-period oom-score-adj conntrack-max-per-core conntrack-min
conntrack-tcp-timeout-established conntrack-tcp-timeout-close-wait conntrack-tcp-be-liberal
conntrack-udp-timeout conntrack-udp-timeout-stream ipvs-scheduler ipvs-exclude-cidrs
ipvs-strict-arp ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout v vmodule logging-format
log-flush-frequency version boot-id-file machine-id-file
"""


def call(*words: str) -> tuple[dict[str, Any], str]:
    """Return the values by name, and the output."""
    seen: dict[str, Any] = {}

    @click.command(context_settings=run_options.GO_STYLE)
    @run_options.kube_proxy_options
    def run(**values: Any) -> None:
        seen.update(values)

    done = CliRunner().invoke(run, words)
    return seen, done.output


def config_of(*words: str) -> KubeProxyConfiguration:
    values, output = call(*words)
    assert values, output
    return run_options.from_flags(values)


def test_every_documented_flag() -> None:
    """Every flag of kube-proxy.md 15 is in the table, and so is every field of the file."""
    assert set(DOCUMENTED.split()) <= {row.flag for row in PARAMETERS}
    listed = [path for row in PARAMETERS for path in row.fields.split()]
    expected = {path for path, _ in fields.leaf_fields()} - {"apiVersion", "kind"}
    assert sorted(listed) == sorted(expected)


def texts() -> Iterator[tuple[Parameter, str]]:
    """Yield a text for each flag that has a field."""
    by_type: dict[Any, str] = {bool: "true", int: "7", str: "x", dict[str, bool]: "A=true"}
    by_type |= {float: "7", fields.Liberal | None: "auto"}
    for row in PARAMETERS:
        if row.flags and row.fields:
            kind = parameters.type_of(row)
            kind = getattr(kind, "__origin__", kind) if "Annotated" in str(kind) else kind
            text = "10.0.0.0/8" if kind == tuple[str, ...] else by_type.get(kind, "7s")
            yield row, __file__ if row.flag == "kubeconfig" else text


@pytest.mark.parametrize(("row", "text"), list(texts()), ids=lambda it: getattr(it, "flag", ""))
def test_reaches_its_fields(row: Parameter, text: str) -> None:
    """Each flag has kube-proxy's name, and sets its fields and no others."""
    default, found = config_of(), config_of(f"--{row.flag}={text}")
    mine = row.fields.split()
    for path, _ in fields.leaf_fields():
        same = fields.value_at(found, path) == fields.value_at(default, path)
        assert same is (path not in mine or fields.value_at(default, path) is True), path


@pytest.mark.parametrize(
    ("words", "verbosity"),
    [(["-v=2"], 2), (["-v", "2"], 2), (["-v2"], 2), (["--v=2"], 2), (["-v"], 4), ([], 0)],
)
def test_all_notations_of_klog_work(words: list[str], verbosity: int) -> None:
    """All of klog's notations work; the flag without a number turns on debug logging."""
    assert config_of(*words).logging.verbosity == verbosity


def test_beside_file() -> None:
    """With --config, only the node's name and logging count among the flags that have a field."""
    values, _ = call("--config=f", "--node-name=a", "-v=4", "--masquerade-all", "--proxy-mode=ipvs")
    found = run_options.override(KubeProxyConfiguration(hostname_override="file"), values)
    assert (found.hostname_override, found.logging.verbosity) == ("a", 4)
    assert (found.masquerade_section.masquerade_all, found.mode) == (False, "")


def test_help_leaves_out_what_does_nothing() -> None:
    """--help shows the flags that have an effect, with their defaults."""
    _, output = call("--help")
    assert "--conntrack-min NUMBER" in output
    assert "[default: 131072]" in output
    assert "--ipvs-strict-arp" not in output
