# SPDX-License-Identifier: Apache-2.0
"""ebpflb's own options of ``run``: read, or refused in one line that names the option."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ebpflb.cli import common
from ebpflb.model import devices
from ebpflb.options import Options, Paths

_PORTS = 65535


def reading(read: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback for click: what ``read`` makes of the text, its ValueError shown as usage."""

    def callback(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
        try:
            return read(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def device_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        devices.check_pattern(pattern)
    return patterns


def port_range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal()):
        raise ValueError(f'"{text}" is not LOW-HIGH')
    first, last = int(low), int(high)
    if not 1 <= first <= last <= _PORTS:
        raise ValueError(f'"{text}" is no range of ports from 1 to {_PORTS}')
    return first, last


def port_text(ports: tuple[int, int]) -> str:
    """What ``port_range`` reads."""
    return "{}-{}".format(*ports)


_OWN = (
    click.option(
        "--manifests",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Read Services, EndpointSlices and Nodes from the YAML files of this directory.",
    ),
    click.option(
        "--guard-nodeports/--no-guard-nodeports",
        default=True,
        show_default=True,
        help="Let bind() to a NodePort fail in the node's network namespace.",
    ),
    click.option(
        "--devices",
        metavar="PATTERN",
        multiple=True,
        callback=reading(device_patterns),
        help="Serve packets at devices of this name ('eth*'), or not at those ('!cali*');"
        " repeatable.  [default: all but loopback]",
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
        default=port_text(Options.masquerade_ports),
        show_default=True,
        callback=reading(port_range),
        help="Source ports of what goes on as this node's; kept from the host's own sockets.",
    ),
    click.option(
        "--cache-dir",
        type=common.DIRECTORY,
        default=Paths.cache,
        show_default=True,
        help="Where compiled bytecode is kept.",
    ),
    common.cgroup_root,
    common.state_dir,
    common.run_dir,
)


def own(command: Any) -> Any:
    """A decorator: all options that kube-proxy does not have."""
    for option in reversed(_OWN):
        command = option(command)
    return command
