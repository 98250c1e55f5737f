# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command has a module of its name; it parses options, calls, and prints.

How the options of ``ebpflb run`` become the agent's ``Options``:

run_options        kube-proxy's flags, and ebpflb's own options
run_configuration  their values, or the file of --config -> a valid KubeProxyConfiguration
run                that configuration and ebpflb's own options -> Options, for the agent

Shared by the commands:

common             options and helpers
output             -o table, wide, json or yaml; and --watch

The other commands:

audit              compare this node with what it should be
check              whether this node can run ebpflb
cleanup            remove ebpflb, or what kube-proxy left behind
demo               a small cluster on this machine
doctor             everything that can be wrong on this node
explain            why a connection goes where it goes
flows              list and delete flows
history            what has changed in the maps, and why
maps               dump the maps
services           show Services as this node serves them
monitor            live events
top                services and backends by rate
status             the state of the agent and of the hooks
ui                 a page in the browser
version            the version, its commit and its date
"""

import gc
import sys
from collections.abc import Callable

import click

from ebpflb import redaction
from ebpflb.errors import EbpflbError, escaped, in_words
from ebpflb.version import VERSION


def _run() -> click.Command:
    from ebpflb.cli.run import run

    return run


def _audit() -> click.Command:
    from ebpflb.cli.audit import audit

    return audit


def _check() -> click.Command:
    from ebpflb.cli.check import check

    return check


def _explain() -> click.Command:
    from ebpflb.cli.explain import explain_

    return explain_


def _maps() -> click.Command:
    from ebpflb.cli.maps import maps

    return maps


def _flows() -> click.Command:
    from ebpflb.cli.flows import flows

    return flows


def _services() -> click.Command:
    from ebpflb.cli.services import services

    return services


def _monitor() -> click.Command:
    from ebpflb.cli.monitor import monitor

    return monitor


def _top() -> click.Command:
    from ebpflb.cli.top import top

    return top


def _history() -> click.Command:
    from ebpflb.cli.history import history

    return history


def _status() -> click.Command:
    from ebpflb.cli.status import status

    return status


def _doctor() -> click.Command:
    from ebpflb.cli.doctor import doctor

    return doctor


def _ui() -> click.Command:
    from ebpflb.cli.ui import ui

    return ui


def _cleanup() -> click.Command:
    from ebpflb.cli.cleanup import cleanup

    return cleanup


def _demo() -> click.Command:
    from ebpflb.cli.demo import demo

    return demo


def _version() -> click.Command:
    from ebpflb.cli.version import version

    return version


# In the order of the module's text.
COMMANDS: dict[str, Callable[[], click.Command]] = {
    "run": _run,
    "audit": _audit,
    "check": _check,
    "explain": _explain,
    "maps": _maps,
    "flows": _flows,
    "services": _services,
    "monitor": _monitor,
    "top": _top,
    "history": _history,
    "status": _status,
    "doctor": _doctor,
    "ui": _ui,
    "cleanup": _cleanup,
    "demo": _demo,
    "version": _version,
}


class Commands(click.Group):
    """Imports the module of the command that is used, and no other: an agent starts sooner."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Disables the garbage collector while it imports: saves a sixth of the start."""
        if name not in COMMANDS:
            return None
        gc.disable()
        try:
            return COMMANDS[name]()
        finally:
            gc.enable()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="ebpflb")
def cli() -> None:
    """A Kubernetes service load balancer in eBPF that replaces kube-proxy, with any CNI."""


def main() -> None:
    """Prints expected errors, and those of a file, as one line, and exits with status 1. Any other
    exception is a bug, and its traceback is printed.
    """
    redaction.guard_tracebacks()
    try:
        cli(prog_name="ebpflb")
    except (EbpflbError, OSError) as error:
        if isinstance(error, OSError) and not error.filename:
            raise
        said = escaped(redaction.redact(in_words(error)), kept="\n\t")
        click.echo(f"ebpflb: {said}", err=True)
        sys.exit(1)
