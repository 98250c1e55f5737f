# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command has a module of its name; it parses options, calls, and prints.

How the options of ``ebpflb run`` become the agent's ``Options``:

kube_proxy_flags   kube-proxy's flags as click knows them
run_options        ebpflb's own options
run_configuration  their values, or the file of --config -> a valid KubeProxyConfiguration
run                that configuration and ebpflb's own options -> Options, for the agent

Shared by the commands:

common             options and helpers
output             -o table, wide, json or yaml
watching           --watch

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
from importlib import import_module

import click

from ebpflb import redaction
from ebpflb.errors import EbpflbError, escaped, in_words
from ebpflb.version import VERSION

# In the order of the module's text; the command is the attribute of the same name.
COMMANDS = (
    *("run", "audit", "check", "explain", "maps"),
    *("flows", "services", "monitor", "top", "history", "status", "doctor"),
    *("ui", "cleanup", "demo", "version"),
)
_ATTRIBUTES = {"explain": "explain_"}


class Commands(click.Group):
    """Imports the module of the command that is used, and no other: an agent starts sooner."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """What is imported is no garbage: to look for some would take a sixth of the time."""
        if name not in COMMANDS:
            return None
        gc.disable()
        try:
            module = import_module(f"ebpflb.cli.{name}")
        finally:
            gc.enable()
        command: click.Command = getattr(module, _ATTRIBUTES.get(name, name))
        return command


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
