# SPDX-License-Identifier: Apache-2.0
"""The options of ``ebpflb run``: its own, and kube-proxy's flags from ``configuration.parameters``.

kube-proxy's flags are accepted in all ways that Go accepts: ``--flag=value``, ``--flag value``, a
boolean as ``--flag`` or ``--flag=false``, underscores instead of dashes. Lists may use commas or
repeat the flag. The value of a flag that is not on the command line is None.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin

import click
import msgspec

from ebpflb.cli import common
from ebpflb.configuration import listen_addresses
from ebpflb.configuration.config_file import decode
from ebpflb.configuration.durations import Duration, FlushFrequency
from ebpflb.configuration.fields import KubeProxyConfiguration, VModule, value_at
from ebpflb.configuration.parameters import PARAMETERS, Parameter, type_of
from ebpflb.model import devices, external_ips, nodeport_ranges, packet_mark, packet_path
from ebpflb.options import SOCKET_TRANSLATIONS, Options, Paths

GO_STYLE = {"token_normalize_func": lambda name: name.replace("_", "-")}
DEBUG_VERBOSITY = 4  # from this verbosity on, details are logged

_LAST_PORT = 65535
_TYPES = {"cleanup": bool, "init-only": bool, "healthz-port": int, "metrics-port": int}
_FILE_FLAGS = {"config", "kubeconfig", "write-config-to"}

_Callback = Callable[[click.Context, click.Parameter, Any], Any]


def ebpflb_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds the options that kube-proxy does not have."""
    for option in reversed(_EBPFLB_OPTIONS):
        command = option(command)
    return command


def kube_proxy_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds all flags of kube-proxy, except --version."""
    for parameter in reversed(PARAMETERS):
        if parameter.flags and parameter.flag != "version":
            command = _flag(parameter)(command)
    return command


def argument_name(parameter: Parameter) -> str:
    """The name of the function argument in which click passes the flag's value."""
    return parameter.flag.replace("-", "_")


def parse_ports(text: str) -> tuple[int, int]:
    """LOW-HIGH -> (low, high)."""
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal()):
        raise ValueError(f'"{text}" is not LOW-HIGH')
    first, last = int(low), int(high)
    if not 1 <= first <= last <= _LAST_PORT:
        raise ValueError(f'"{text}" is not a range of ports from 1 to {_LAST_PORT}')
    return first, last


def format_ports(ports: tuple[int, int]) -> str:
    """(low, high) -> LOW-HIGH."""
    return "{}-{}".format(*ports)


def _check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        devices.check_pattern(pattern)
    return patterns


def _parsed_by(parse: Callable[[Any], Any]) -> _Callback:
    """A callback for click that parses the value; a ValueError becomes a usage error."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


_EBPFLB_OPTIONS = (
    click.option(
        "--manifests",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Read Services, EndpointSlices and Nodes from the YAML files in this directory, not"
        " from the API server.",
    ),
    click.option(
        "--guard-nodeports/--no-guard-nodeports",
        default=True,
        show_default=True,
        help="Make bind() to a NodePort fail in the node's network namespace.",
    ),
    click.option(
        "--devices",
        metavar="PATTERN",
        multiple=True,
        callback=_parsed_by(_check_patterns),
        help="Serve packets on network devices with this name ('eth*'), or not on those ('!cali*')."
        " Can be repeated.  [default: all but loopback]",
    ),
    click.option(
        "--packet-path",
        type=click.Choice(packet_path.CHOICES),
        default=Options.packet_path,
        show_default=True,
        help="What opens flows of packets: the kernel's conntrack, ebpflb's own flow tables, or"
        " conntrack where the kernel lets programs use it.",
    ),
    click.option(
        "--socket-translation",
        type=click.Choice(SOCKET_TRANSLATIONS),
        default=Options.socket_translation,
        show_default=True,
        help="Whose sockets are connected to backends: all, or only those of the node's own network"
        " namespace. Pods' packets are then translated at their device: service meshes and rules"
        " inside pods see the service's address.",
    ),
    click.option(
        "--masquerade-local-backends/--no-masquerade-local-backends",
        default=False,
        show_default=True,
        help="Masquerade external clients also for backends on this node, as kube-proxy does.",
    ),
    click.option(
        "--masquerade-ports",
        metavar="LOW-HIGH",
        default=format_ports(Options.masquerade_ports),
        show_default=True,
        callback=_parsed_by(parse_ports),
        help="Source ports of masqueraded connections. The host's own sockets do not get them.",
    ),
    click.option(
        "--packet-mark",
        metavar="MARK/MASK",
        default=str(Options.packet_mark),
        callback=_parsed_by(packet_mark.parse),
        help="Set this mark on packets that the flow tables translate when they come in, so that"
        " rules of netfilter can accept them.  [default: none]",
    ),
    click.option(
        "--external-ips",
        metavar="all|none|CIDR,...",
        default=str(Options.external_ips),
        show_default=True,
        callback=_parsed_by(external_ips.parse),
        help="Which of the Services' externalIPs are served. Everybody who may write a Service can"
        " claim any address by them (CVE-2020-8554).",
    ),
    click.option(
        "--nodeport-source-ranges",
        metavar="CIDR,...",
        default="",
        callback=_parsed_by(nodeport_ranges.parse),
        help="The clients that NodePorts admit, pods and the node included, unless the Service's"
        f" annotation {nodeport_ranges.ANNOTATION} says otherwise.  [default: everybody]",
    ),
    click.option(
        "--cache-dir",
        type=common.DIRECTORY,
        default=Paths.cache,
        show_default=True,
        help="Directory for compiled bytecode.",
    ),
    common.cgroup_root,
    common.state_dir,
    common.run_dir,
)


def _flag(parameter: Parameter) -> Callable[[Any], Any]:
    kind = type_of(parameter) if parameter.fields else _TYPES.get(parameter.flag, str)
    without_value: dict[str, Any] = {}  # what the flag means if no value follows it
    if kind is bool or parameter.flag == "v":
        value = "true" if kind is bool else str(DEBUG_VERBOSITY)
        without_value = {"is_flag": False, "flag_value": value}
    names = parameter.flags.split()
    is_kubeconfig = parameter.flag == "kubeconfig"
    return click.option(
        argument_name(parameter),
        *(f"-{name}" for name in names if len(name) == 1),
        *(f"--{name}" for name in names),
        type=click.Path(exists=True, dir_okay=False) if is_kubeconfig else click.STRING,
        multiple=_is_collection(kind),
        metavar=_metavar(parameter, kind),
        callback=_converted_to(kind),
        help=parameter.help + _default_text(parameter),
        hidden=parameter.ignored,
        **without_value,
    )


def _metavar(parameter: Parameter, kind: Any) -> str:
    if parameter.flag in _FILE_FLAGS:
        return "FILE"
    names = {bool: "true|false", str: "TEXT", dict[str, bool]: "GATE=BOOL"}
    names |= dict.fromkeys((Duration, FlushFrequency), "DURATION")
    return names.get(kind, "LIST" if _is_collection(kind) else "NUMBER")


def _default_text(parameter: Parameter) -> str:
    """The default as kube-proxy's help shows it; nothing for "", booleans and collections."""
    if not parameter.fields:
        return ""
    default = listen_addresses.complete(KubeProxyConfiguration(), frozenset())
    value = value_at(default, parameter.fields.split()[0])
    shown = value and not isinstance(value, bool | tuple | dict)
    return f"  [default: {value}]" if shown else ""


def _is_collection(kind: Any) -> bool:
    return get_origin(kind) in (tuple, dict)


def _converted_to(kind: Any) -> _Callback:
    """A callback for click that converts the text to the type of the field."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        if value is None or value == ():
            return None
        try:
            return msgspec.convert(_split(kind, value), kind, strict=False, dec_hook=decode)
        except (msgspec.ValidationError, ValueError) as error:
            text = value if isinstance(value, str) else ",".join(value)
            reason = str(error).partition(" - at ")[0].replace("`", "")
            raise click.BadParameter(f'"{text}": {reason}') from error

    return callback


def _split(kind: Any, value: Any) -> Any:
    """The texts of a collection -> its elements, as plain values."""
    if not _is_collection(kind):
        return value.removeprefix("=")  # click passes "=2" for -v=2
    parts = [part.strip() for text in value for part in text.split(",") if part.strip()]
    if kind == tuple[str, ...]:
        return parts
    pairs = [part.partition("=") for part in parts]
    if get_origin(kind) is dict:
        return {key.strip(): text.strip().lower() for key, _, text in pairs}
    return [VModule(file_pattern=key, verbosity=int(text)) for key, _, text in pairs]
