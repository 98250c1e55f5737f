# SPDX-License-Identifier: Apache-2.0
"""Options whose text means something: read, or refused in one line that names the option."""

from collections.abc import Callable
from typing import Any

import click

from ebpflb.model import devices, nodeports
from ebpflb.model.addresses import Network, family, parse_network
from ebpflb.model.locality import Detector, Mode
from ebpflb.settings import Settings

Option = Callable[[Any], Any]

_PORTS = 65535
_NEEDS = {
    Mode.BRIDGE: ("bridge", "--pod-bridge-interface"),
    Mode.NAME_PREFIX: ("name_prefix", "--pod-interface-name-prefix"),
}


def reading(read: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback for click: what ``read`` makes of the text, its ValueError shown as usage."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        try:
            return read(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def nodeport_addresses(text: str) -> tuple[str, ...]:
    choice = _parts(text)
    if nodeports.PRIMARY[0] in choice and choice != nodeports.PRIMARY:
        raise ValueError("'primary' stands alone")
    nodeports.networks(choice, {})
    return choice


def device_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        devices.check_pattern(pattern)
    return patterns


def cluster_cidrs(text: str) -> tuple[Network, ...]:
    """As kube-proxy: one CIDR, or one of each family."""
    found = tuple(parse_network(part) for part in _parts(text))
    if len({family(network) for network in found}) < len(found):
        raise ValueError(f'"{text}" has more than one CIDR of a family')
    return found


def port_range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal()):
        raise ValueError(f'"{text}" is not LOW-HIGH')
    first, last = int(low), int(high)
    if not 1 <= first <= last <= _PORTS:
        raise ValueError(f'"{text}" is no range of ports from 1 to {_PORTS}')
    return first, last


def detector(chosen: dict[str, Any]) -> Detector:
    """Takes the options of ``detect_local`` out of ``chosen``.

    Raises UsageError where the mode lacks what it goes by (kube-proxy.md 15).
    """
    made = Detector(
        Mode(chosen.pop("detect_local_mode")),
        chosen.pop("cluster_cidr"),
        chosen.pop("pod_bridge_interface"),
        chosen.pop("pod_interface_name_prefix"),
    )
    field, option = _NEEDS.get(made.mode, ("mode", ""))
    if not getattr(made, field):
        raise click.UsageError(f"--detect-local-mode {made.mode} needs {option}")
    return made


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _together(*options: Option) -> Option:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


masquerading = _together(
    click.option(
        "--masquerade-all",
        is_flag=True,
        help="Let all traffic to cluster IPs go on as this node's.",
    ),
    click.option(
        "--masquerade-local-backends/--no-masquerade-local-backends",
        default=False,
        show_default=True,
        help="Hide outside clients from endpoints on this node too, as kube-proxy does.",
    ),
    click.option(
        "--masquerade-ports",
        metavar="LOW-HIGH",
        default="{}-{}".format(*Settings.masquerade_ports),
        show_default=True,
        callback=reading(port_range),
        help="Source ports of what goes on as this node's; kept from the host's own sockets.",
    ),
)
detect_local = _together(
    click.option(
        "--detect-local-mode",
        type=click.Choice([mode.value for mode in Mode]),
        default=Mode.CLUSTER_CIDR.value,
        show_default=True,
        help="How pods are told from others.",
    ),
    click.option(
        "--cluster-cidr",
        default="",
        callback=reading(cluster_cidrs),
        help="The pods' addresses, in mode ClusterCIDR: a CIDR, or one of each family with a comma"
        " between.",
    ),
    click.option(
        "--pod-bridge-interface",
        default="",
        help="The bridge that pods are plugged into, in mode BridgeInterface.",
    ),
    click.option(
        "--pod-interface-name-prefix",
        default="",
        help="How the names of pods' devices begin, in mode InterfaceNamePrefix.",
    ),
)
