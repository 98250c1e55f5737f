# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command is a module that parses options, calls the tools, and prints.

How the options of ``ebpflb run`` become the agent's ``Options``:

run_options        kube-proxy's flags and ebpflb's own options; their values, or the file of
                   --config -> a valid KubeProxyConfiguration
logs               the agent's log: its format, and what signals do
run                that configuration and ebpflb's own options -> Options, for the agent

Shared by the commands:

common             options and helpers
output             how everything is printed; -o

The other commands:

check              whether this node can run ebpflb
cleanup            remove ebpflb, or what kube-proxy left behind
demo               a small cluster on this machine
doctor             everything that can be wrong on this node
explain            why a connection goes where it goes
flows              list and delete flows
history            what has changed in the maps, and why
maps               dump the maps
monitor            live events
report             one file with all of this, for somebody else
services           show Services as this node serves them
status             the state of the agent and of the hooks
ui                 a page in the browser
version            the version, its commit and its date
"""

import sys
from importlib import import_module

import click

from ebpflb import redaction
from ebpflb.errors import EbpflbError, escaped, in_words
from ebpflb.files import DOCS
from ebpflb.version import VERSION

# In the order of --help, which imports them all; other uses import one.
COMMANDS = (
    *("run", "status", "check", "doctor", "services", "explain", "monitor"),
    *("flows", "maps", "history", "report", "ui", "cleanup", "demo", "version"),
)
# As kubectl takes the singular and a short name of what it lists.
ALIASES = {"service": "services", "svc": "services", "flow": "flows", "map": "maps"}
# Commands of earlier versions.
REMOVED = {
    "audit": "`ebpflb doctor` answers what it answered; `status` does without an agent.",
    "top": "`ebpflb ui` shows rates; `watch ebpflb services get NAME -o wide` how the counts grow.",
}


_SUMMARY = 100  # characters


class Commands(click.Group):
    """The commands. Only the module of the used command is imported, so an agent starts sooner."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the first sentence of each command's help."""
        found = {name: self.get_command(ctx, name) for name in COMMANDS}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, it.get_short_help_str(_SUMMARY)) for name, it in found.items() if it]
            )

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        name = ALIASES.get(name, name)
        if name in REMOVED and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command '{name}'. {REMOVED[name]}", ctx)
        if name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"ebpflb.cli.{name}"), name)
        return command


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Documentation: {DOCS}",
)
@click.version_option(VERSION, prog_name="ebpflb")
def cli() -> None:
    """A Kubernetes service load balancer in eBPF that replaces kube-proxy, with any CNI.

    \b
    $ ebpflb status
    $ ebpflb services get shop/cart
    $ ebpflb explain shop/cart:http
    """


def main() -> None:
    """Run a command; print expected errors and errors of files as one line, and exit with status 1.

    Any other exception is a bug, and its traceback is printed.
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
