# SPDX-License-Identifier: Apache-2.0
"""The tables of flags in docs/configuration.md, made of what the code declares.

python -m tests.config.page    writes them again
"""

from pathlib import Path

from ebpflb.cli.run_options import format_value
from ebpflb.config.parameters import IGNORED_FIELDS, PARAMETERS, Parameter
from ebpflb.options import Flag, Options, Paths, flags_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
END = "<!-- until here -->\n"


def own_table() -> str:
    """The options that kube-proxy does not have, by name."""
    declared = [(flag, default) for kind in (Options, Paths) for _, flag, default in flags_of(kind)]
    declared.sort(key=lambda it: it[0].name)
    lines = (_own_line(flag, default) for flag, default in declared)
    return "| option | chart | default | meaning |\n|---|---|---|---|\n" + "".join(lines)


def _own_line(flag: Flag, default: object) -> str:
    chart = flag.chart if flag.chart == "-" else f"`{flag.chart}`"
    variable = f"Or `{flag.variable}`." if flag.variable else ""
    shown = flag.default_text or f"`{format_value(flag.shown(default))}`".replace("``", "-")
    meaning = " ".join(filter(None, (flag.help, variable, flag.details)))
    return f"| `{flag.name}` | {chart} | {shown} | {meaning} |\n"


# Their meaning and their defaults are kube-proxy's; `ebpflb run --help` describes them too.
AS_IN_KUBE_PROXY = {
    "config", "write-config-to", "init-only", "kubeconfig", "master", "hostname-override",
    "bind-address", "healthz-bind-address", "metrics-bind-address", "healthz-port", "metrics-port",
    "bind-address-hard-fail", "detect-local-mode", "cluster-cidr", "pod-bridge-interface",
    "pod-interface-name-prefix", "masquerade-all", "oom-score-adj", "conntrack-max-per-core",
    "conntrack-min", "conntrack-tcp-timeout-established", "conntrack-tcp-timeout-close-wait",
    "conntrack-tcp-be-liberal", "conntrack-udp-timeout", "conntrack-udp-timeout-stream",
    "ipvs-sync-period", "ipvs-min-sync-period", "version",
}  # fmt: skip


def kube_proxy_table() -> str:
    """The parameters that ebpflb understands in its own way, in the order of kube-proxy.md 15; then
    those without effect, by reason.
    """
    honoured = [each for each in PARAMETERS if not each.ignored]
    own = [_line(each) for each in honoured if each.flag not in AS_IN_KUBE_PROXY]
    reasons: dict[str, list[str]] = {}
    for each in filter(lambda it: it.ignored, PARAMETERS):
        reasons.setdefault(each.help, []).append(_flags(each) or _fields(each))
    ignored = "".join(f"- {', '.join(each)}: {reason}\n" for reason, each in reasons.items())
    fields = ", ".join(f"`{each}`" for each in IGNORED_FIELDS.split())
    return (
        f"| flag | field | description |\n|---|---|---|\n{''.join(own)}"
        f"\nAccepted without effect, as are their fields:\n\n{ignored}"
        f"\nFields that are not even read, so that no value of theirs is an error: {fields}.\n"
    )


TABLES = {
    "<!-- made of ebpflb/options.py -->\n": own_table,
    "<!-- made of ebpflb/config/parameters.py -->\n": kube_proxy_table,
}


def current(page: str) -> str:
    """The page with the tables as they should be."""
    for begin, table in TABLES.items():
        before, _, rest = page.partition(begin)
        page = before + begin + table() + END + rest.partition(END)[2]
    return page


def _line(parameter: Parameter) -> str:
    cells = (_flags(parameter) or "-", _fields(parameter) or "-", parameter.help)
    return f"| {' | '.join(cells)} |\n"


def _flags(parameter: Parameter) -> str:
    names = parameter.flags.split()
    return " ".join(f"`-{each}`" if len(each) == 1 else f"`--{each}`" for each in names)


def _fields(parameter: Parameter) -> str:
    return " ".join(f"`{each}`" for each in parameter.fields.split())


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
