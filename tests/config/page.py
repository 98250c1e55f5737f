# SPDX-License-Identifier: Apache-2.0
"""The table of options in docs/configuration.md, made from the declarations in the code.

python -m tests.config.page writes it again
"""

from pathlib import Path

from ebpflb.cli.run_options import format_value
from ebpflb.options import Flag, Options, Paths, flags_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN = "<!-- made of ebpflb/options.py -->\n"
END = "<!-- until here -->\n"

# By option: the page that explains it.
LINKS = {
    "--answer-pings": "vips.md",
    "--api-server": "api-servers.md",
    "--audit": "reliability.md#how-does-the-agent-notice-what-others-change",
    "--endpoint-health": "endpoint-health.md",
    "--fast-forward": "#what-do-the-larger-options-cost",
    "--hand-over": "client-addresses.md",
    "--load-balancer-unknown-ports": "vips.md",
    "--l2-pool": "load-balancer-addresses.md",
    "--local-api-server": "api-servers.md#how-does-a-kubelet-use-it",
    "--manifests": "getting-started.md#how-do-i-serve-a-service-from-a-file",
    "--map-size": "scale.md#how-large-are-the-maps",
    "--namespaces": "migration.md#a-little-at-a-time",
    "--node-local-addresses": "node-local.md",
    "--node-readiness": "node-readiness.md",
    "--packet-path": "architecture.md#two-engines",
    "--reply-path": "#what-do-the-larger-options-cost",
    "--scheduler": "scheduling.md",
    "--service-metrics": "metrics.md#metrics-of-each-service",
    "--services": "migration.md#a-little-at-a-time",
    "--shadow": "migration.md#a-little-at-a-time",
    "--socket-translation": "#how-do-i-run-a-service-mesh",
}
# By option: what the page says besides the option's help.
DETAILS = {
    "--local-api-server": "Only with the systemd unit or a static pod.",
    "--masquerade-ports": "netfilter uses 1024-29999 and 32768-65535, without these ports if a flow"
    " can be in the flow tables.",
    "--namespace-share": "Choose 100 if all Services are in one namespace.",
    "--nodeport-source-ranges": "Others are dropped. If no CIDR of a family is listed, or `/0`, all"
    " clients of that family are admitted.",
    "--packet-mark": "Replies that are translated when they leave have no mark: accept them by `ct "
    "state established`.",
    "--packet-path": "With `netfilter` the agent does not start where it cannot work.",
}
# The value of the chart that sets an option, if its name is another one; "-": the chart decides.
_CHART = {
    **dict.fromkeys(
        ("--cgroup-root", "--local-api-server", "--state-dir", "--run-dir", "--cache-dir"), "-"
    ),
    **dict.fromkeys(
        (
            *("--manifests", "--guard-nodeports", "--devices"),
            *("--masquerade-local-backends", "--masquerade-ports"),
        ),
        "extraArgs",
    ),
    "--api-server": "apiServer.hosts",
    "--l2-pool": "l2Pools",
    "--map-size": "mapSizes",
    "--external-ips": "externalIPs",
    "--nodeport-source-ranges": "nodePortSourceRanges",
}


def chart_value(flag: Flag) -> str:
    """Return the value of the chart that sets an option."""
    first, *others = flag.name.lstrip("-").split("-")
    return _CHART.get(flag.name, first + "".join(map(str.capitalize, others)))


def own_table() -> str:
    """Return the table of options that kube-proxy does not have, by name."""
    declared = [(flag, default) for kind in (Options, Paths) for _, flag, default in flags_of(kind)]
    declared.sort(key=lambda it: it[0].name)
    lines = (_own_line(flag, default) for flag, default in declared)
    return "| option | chart | default | meaning |\n|---|---|---|---|\n" + "".join(lines)


def _own_line(flag: Flag, default: object) -> str:
    chart = "-" if chart_value(flag) == "-" else f"`{chart_value(flag)}`"
    variable = f"Or `{flag.variable}`." if flag.variable else ""
    shown = flag.default_text or f"`{format_value(flag.shown(default))}`".replace("``", "-")
    meaning = " ".join(filter(None, (flag.help, variable, DETAILS.get(flag.name))))
    link = LINKS.get(flag.name)
    name = f"[`{flag.name}`]({link})" if link else f"`{flag.name}`"
    return f"| {name} | {chart} | {shown} | {meaning} |\n"


def current(page: str) -> str:
    """Return the page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + own_table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
