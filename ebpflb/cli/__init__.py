# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command has a module of its name; it parses options, calls, and prints.

How the options of ``ebpflb run`` become the agent's ``Options``:

run_options        kube-proxy's flags, and ebpflb's own options
run_configuration  their values, or the file of --config -> a valid KubeProxyConfiguration
run                that configuration and ebpflb's own options -> Options, for the agent

Shared by the commands:

common             options and helpers
output             how everything is printed; -o and --watch
results            the table of check and doctor
hints              what was probably meant by a wrong use

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
monitor            live events
services           show Services as this node serves them
status             the state of the agent and of the hooks
top                services and backends by rate
ui                 a page in the browser
version            the version, its commit and its date
"""

import atexit
import gc
import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from ebpflb import redaction
from ebpflb.errors import EbpflbError, escaped, in_words
from ebpflb.version import VERSION


def _complete_help(
    context: click.Context, _argument: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The commands of the command that the words so far name."""
    command: click.Command | None = context.find_root().command
    for word in context.params.get("words") or ():
        command = command.get_command(context, word) if isinstance(command, click.Group) else None
    if not isinstance(command, click.Group):
        return []
    return [
        CompletionItem(it) for it in command.list_commands(context) if it.startswith(incomplete)
    ]


@click.command("help")
@click.argument("words", metavar="[COMMAND]...", nargs=-1, shell_complete=_complete_help)
@click.pass_context
def _print_help(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command."""
    command, context = context.find_root().command, context.find_root()
    for word in words:
        if not isinstance(command, click.Group):
            raise click.UsageError(f"{context.info_name} has no commands", context)
        name, found, _ = command.resolve_command(context, [word])
        assert found  # else resolve_command has raised an error
        command, context = found, click.Context(found, info_name=name, parent=context)
    click.echo(command.get_help(context))


def _imported(name: str) -> click.Command | None:
    """Return the command of this name, and import its module alone; None if there is none."""
    command: click.Command | None = None
    match name:
        case "run":
            from ebpflb.cli.run import run as command
        case "audit":
            from ebpflb.cli.audit import audit as command
        case "check":
            from ebpflb.cli.check import check as command
        case "explain":
            from ebpflb.cli.explain import explain_ as command
        case "maps":
            from ebpflb.cli.maps import maps as command
        case "flows":
            from ebpflb.cli.flows import flows as command
        case "services":
            from ebpflb.cli.services import services as command
        case "monitor":
            from ebpflb.cli.monitor import monitor as command
        case "top":
            from ebpflb.cli.top import top as command
        case "history":
            from ebpflb.cli.history import history as command
        case "status":
            from ebpflb.cli.status import status as command
        case "doctor":
            from ebpflb.cli.doctor import doctor as command
        case "ui":
            from ebpflb.cli.ui import ui as command
        case "cleanup":
            from ebpflb.cli.cleanup import cleanup as command
        case "demo":
            from ebpflb.cli.demo import demo as command
        case "version":
            from ebpflb.cli.version import version as command
        case "help":
            command = _print_help
    return command


# With what --help and completion show: they import no command.
COMMANDS = {
    "run": "Run the agent, which serves Services on this node.",
    "status": "Show how this node stands, and why.",
    "check": "Check whether this node can run ebpflb.",
    "doctor": "Look for everything that can be wrong on this node, and say what to do.",
    "audit": "Compare this node with what it should be, once, and change nothing.",
    "services": "Show Services as this node serves them.",
    "explain": "Explain why a connection goes where it goes, step by step.",
    "monitor": "Show what the datapath decides, as it does: until Ctrl-C.",
    "top": "Show Services and their backends by new connections a second, the fastest first.",
    "flows": "List and delete the flows whose packets are translated.",
    "maps": "Inspect the maps in the kernel.",
    "history": "Show what has changed in the maps, and which object or event was the cause.",
    "ui": "Serve a page that shows this node in a browser, until Ctrl-C.",
    "cleanup": "Detach ebpflb's programs and remove its maps.",
    "demo": "Demonstrate ebpflb with real traffic.",
    "version": "Show the version, the commit that it was built from, and that commit's date.",
    "help": "Show the help of a command.",
}
# As kubectl takes the singular and a short name of what it lists.
ALIASES = {"service": "services", "svc": "services", "flow": "flows", "map": "maps"}


class Commands(click.Group):
    """Imports the module of the command that is used, and no other: an agent starts sooner."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands, and options."""
        return [
            *(
                CompletionItem(name, help=summary)
                for name, summary in COMMANDS.items()
                if name.startswith(incomplete)
            ),
            *click.Command.shell_complete(self, ctx, incomplete),
        ]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Keeps the garbage collector away from what is imported: saves a sixth of the start."""
        gc.disable()
        try:
            return _imported(ALIASES.get(name, name))
        finally:
            gc.freeze()
            gc.enable()

    def invoke(self, ctx: click.Context) -> Any:
        """Adds to a wrong use what was probably meant."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            from ebpflb.cli.hints import with_hint

            raise with_hint(error) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggests commands for a mistyped name, as click does for the commands that it knows."""
        name = args[0]
        is_known = name in COMMANDS or name in ALIASES or name.startswith("-")
        if not is_known and not ctx.resilient_parsing:
            raise click.exceptions.NoSuchCommand(name, possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="ebpflb")
def cli() -> None:
    """A Kubernetes service load balancer in eBPF that replaces kube-proxy, with any CNI."""


def main() -> None:
    """Prints expected errors, and those of a file, as one line, and exits with status 1. Any other
    exception is a bug, and its traceback is printed.
    """
    redaction.guard_tracebacks()
    # The interpreter looks for garbage before it ends: saves an eighth of most commands' time.
    atexit.register(gc.freeze)
    try:
        cli(prog_name="ebpflb")
    except (EbpflbError, OSError) as error:
        if isinstance(error, OSError) and not error.filename:
            raise
        said = escaped(redaction.redact(in_words(error)), kept="\n\t")
        click.echo(f"ebpflb: {said}", err=True)
        sys.exit(1)
