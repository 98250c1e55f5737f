# SPDX-License-Identifier: Apache-2.0
"""The options of ``ebpflb run``: kube-proxy's flags, and those that kube-proxy does not have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin

import click
import msgspec

from ebpflb.cli import common
from ebpflb.config import listen_addresses
from ebpflb.config.config_file import decode
from ebpflb.config.fields import KubeProxyConfiguration, VModule, value_at
from ebpflb.config.parameters import PARAMETERS, Parameter, type_of
from ebpflb.errors import in_json_words, plain
from ebpflb.kernel.maps import map_sizes
from ebpflb.model import annotations, devices, packet_path, services
from ebpflb.model.durations import Duration, FlushFrequency
from ebpflb.options import AUDITS, REPLY_PATHS, SOCKET_TRANSLATIONS, Options, Paths

# kube-proxy's flags as options of ``ebpflb run``, from ``configuration.parameters``.
#
# They are accepted in all ways that Go accepts: ``--flag=value``, ``--flag value``, a boolean as
# ``--flag`` or ``--flag=false``, underscores instead of dashes. Lists may use commas or repeat the
# flag. The value of a flag that is not on the command line is None.

GO_STYLE = {"token_normalize_func": lambda name: name.replace("_", "-")}
DEBUG_VERBOSITY = 4  # from this verbosity on, details are logged

_DEFAULT = listen_addresses.complete_listen_address(KubeProxyConfiguration(), frozenset())
_LONGEST_NUMBER = 10  # digits

_TYPES = {"cleanup": bool, "init-only": bool, "healthz-port": int, "metrics-port": int}
_FILE_FLAGS = {"config", "kubeconfig", "write-config-to"}

_Callback = Callable[[click.Context, click.Parameter, Any], Any]


def kube_proxy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds all flags of kube-proxy, except --version."""
    for parameter in reversed(PARAMETERS):
        if parameter.flags and parameter.flag != "version":
            command = _flag(parameter)(command)
    return command


def argument_name(parameter: Parameter) -> str:
    """The name of the function argument in which click passes the flag's value."""
    return parameter.flag.replace("-", "_")


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
    value = value_at(_DEFAULT, parameter.fields.split()[0])
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
        except UnicodeError as error:
            raise click.BadParameter("is not UTF-8") from error
        except ValueError as error:  # msgspec's among them
            text = value if isinstance(value, str) else ",".join(value)
            reason = in_json_words(str(error).partition(" - at ")[0])
            raise click.BadParameter(plain(f'"{text}": {reason}')) from error

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
    return [VModule(file_pattern=key, verbosity=_verbosity(text)) for key, _, text in pairs]


def _verbosity(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > _LONGEST_NUMBER:
        raise ValueError("is not PATTERN=NUMBER,...")
    return int(text)


_LAST_PORT = 65535


def ebpflb_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that adds the options that kube-proxy does not have."""
    for option in reversed(_EBPFLB_OPTIONS):
        command = option(command)
    return command


def parse_ports(text: str) -> tuple[int, int]:
    """LOW-HIGH -> (low, high)."""
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal()):
        raise ValueError(f'"{text}" is not LOW-HIGH such as 10000-29999')
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


def _check_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if address and not (colon and port.isdecimal() and 0 < int(port) <= _LAST_PORT):
        raise ValueError(f'"{address}" is not HOST:PORT')
    if ":" in host and not host.startswith("["):
        raise ValueError(f'"{address}": an IPv6 address is written in brackets')
    return address


class _PacketPath(click.Choice[str]):
    """Takes the former name of an engine too, with a warning."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if new := packet_path.FORMER_NAMES.get(value):
            click.echo(f"warning: --packet-path={value} is called {new} now", err=True)
            value = str(new)
        return super().convert(value, param, ctx)


def _parsed_by(parse: Callable[[Any], Any]) -> _Callback:
    """A callback for click that parses the value; a ValueError becomes a usage error."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(plain(str(error))) from error

    return callback


def _filled(parse: Callable[[str], Any]) -> Callable[[str | None], Any]:
    """``parse``, whose "" means that nothing is left out: that is the default, and must not come of
    a shell's variable that is not set.
    """

    def parse_filled(text: str | None) -> Any:
        if text is not None and not text.strip():
            raise ValueError("is empty; leave the option out, if all are meant")
        return parse(text or "")

    return parse_filled


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
        type=_PacketPath(packet_path.CHOICES),
        default=Options.packet_path,
        show_default=True,
        help="What translates packets: the kernel's NAT (netfilter), ebpflb's own flow tables, or"
        " netfilter where its NAT works with nftables.",
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
        help="Source ports of masqueraded connections of the flow tables. The host's own sockets do"
        " not get them, nor do connections that netfilter masquerades.",
    ),
    click.option(
        "--reply-path",
        type=click.Choice(REPLY_PATHS),
        default=Options.reply_path,
        show_default=True,
        help="Where replies of the flow tables leave: as the backend's packets are routed, or by"
        " the device where their requests came in, past routing rules, netfilter and conntrack.",
    ),
    click.option(
        "--fast-forward/--no-fast-forward",
        default=Options.fast_forward,
        show_default=True,
        help="Forward packets of established flows past routing rules, netfilter and conntrack:"
        " those of the flow tables in the programs, where answers leave by the device that requests"
        " came in by; with netfilter by the kernel's flowtable.",
    ),
    click.option(
        "--packet-mark",
        metavar="MARK/MASK",
        default=str(Options.packet_mark),
        callback=_parsed_by(packet_path.parse_mark),
        help="Set this mark on packets that the flow tables translate when they come in, so that"
        " rules of netfilter can accept them; with it --packet-path=auto takes the flow tables."
        "  [default: none]",
    ),
    click.option(
        "--namespaces",
        metavar="NAME,...",
        callback=_parsed_by(_filled(services.parse_namespaces)),
        help="Serve only Services of these namespaces; a kube-proxy that runs beside serves the"
        " others.  [default: all]",
    ),
    click.option(
        "--services",
        metavar="SELECTOR",
        callback=_parsed_by(_filled(services.parse_requirements)),
        help="Serve only Services with these labels, as kubectl's -l; a kube-proxy that runs beside"
        " serves the others.  [default: all]",
    ),
    click.option(
        "--namespace-share",
        metavar="PERCENT",
        type=click.IntRange(1, 100),
        default=round(100 * Options.namespace_share),
        show_default=True,
        help="How much of each map of services, endpoints, source ranges and tables the Services of"
        " one namespace may use. What does not fit is named by `ebpflb status` and an Event.",
    ),
    click.option(
        "--scheduler",
        type=click.Choice(annotations.SCHEDULERS),
        help="How new connections get their endpoint, unless the Service's annotation"
        f" {annotations.SCHEDULER_ANNOTATION} says otherwise.  [default: random, in mode ipvs what"
        " comes next to --ipvs-scheduler, round-robin if that says nothing]",
    ),
    click.option(
        "--shadow/--no-shadow",
        default=False,
        show_default=True,
        help="Only count what would be decided: nothing new is translated, refused or dropped, and"
        " a kube-proxy that runs beside serves everything. Connections from before go on.",
    ),
    click.option(
        "--external-ips",
        metavar="all|none|CIDR,...",
        default=str(Options.external_ips),
        show_default=True,
        callback=_parsed_by(services.parse_external_ips),
        help="Which of the Services' externalIPs are served. Everybody who may write a Service can"
        " claim any address by them (CVE-2020-8554).",
    ),
    click.option(
        "--nodeport-source-ranges",
        metavar="CIDR,...",
        callback=_parsed_by(_filled(annotations.parse_networks)),
        help="The clients that NodePorts admit, pods and the node included, unless the Service's"
        f" annotation {annotations.NODEPORT_RANGES_ANNOTATION} says otherwise."
        "  [default: everybody]",
    ),
    click.option(
        "--audit",
        type=click.Choice(AUDITS),
        default=Options.audit,
        show_default=True,
        help="What to do with programs, pins and map entries that others have changed: put them"
        " back, or only report them.",
    ),
    click.option(
        "--readyz-bind-address",
        metavar="HOST:PORT",
        default=Options.readyz_address,
        show_default=True,
        callback=_parsed_by(_check_address),
        help="Where /readyz, /healthz and /livez are also served, so that no kube-proxy answers on"
        ' the same port; "" disables it.',
    ),
    click.option(
        "--map-size",
        metavar="NAME=ENTRIES,...",
        multiple=True,
        callback=_parsed_by(lambda texts: map_sizes.parse(",".join(texts))),
        help=f"Other sizes of maps: {', '.join(map_sizes.SIZES)} (docs/scale.md has the memory for"
        " each). Other sizes than before are new maps: flows of packets begin anew.",
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
    common.agent_run_dir,
)
