# SPDX-License-Identifier: Apache-2.0
"""The commands: each module is imported only when its command is used."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from ebpflb import cli as cli_package
from ebpflb.cli import COMMANDS, cli
from ebpflb.version import BUILD_DATE, COMMIT, VERSION
from tests.cli.commands import every_command

OTHERS = ("ebpflb.cli.demo", "ebpflb.cli.explain", "ebpflb.lab", "kubernetes.client.rest", "bcc")
# Libraries that a command imports when it needs them, if ever; ebpflb.lab is the demo's.
HEAVY = {
    *("asyncio", "bcc", "cffi", "h11", "multiprocessing", "prometheus_client", "urllib3", "yaml"),
    *("pyroute2.iproute", "pyroute2.netlink", "starlette", "uvicorn", "ebpflb_page", "ebpflb.lab"),
}
# Whose strings name options of other programs: iptables', and nsenter's.
NAMES_OTHERS = (
    "lab/",
    "tools/firewall.py",
    "model/kube_proxy.py",
    "kernel/netfilter/firewall.py",
    "kernel/netfilter/each_packet.py",
    "kernel/netfilter/untracked.py",
)
OPTIONS_OF_OTHERS = {"--help", "--net", "--requirement"}
OF_KUBE_PROXY = {"config", "write_config_to", "kubeconfig"}  # options with paths
SHARED = {"common", "output", "run_options"}


def test_version_names_commit_and_date() -> None:
    """`ebpflb version` shows the version, the commit that it was built from, and that commit's
    date.
    """
    shown = [line.split() for line in CliRunner().invoke(cli, ["version"]).output.splitlines()]
    assert shown == [["ebpflb", VERSION], ["commit", COMMIT], ["build", "date", BUILD_DATE]]


def test_an_agent_imports_only_what_it_uses() -> None:
    """The agent imports no other command, and no Kubernetes client unless it has an API server."""
    code = "import sys, ebpflb.cli as c; c.cli.get_command(None, 'run'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(OTHERS).isdisjoint(done.stdout.split())
    assert "ebpflb.agent.loop" in done.stdout.split()


def imported(code: str) -> set[str]:
    """Return the modules that a process has imported after running this code."""
    words = [sys.executable, "-c", f"import sys, ebpflb.cli as c; {code}; print(*sys.modules)"]
    return set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"run"}))
def test_no_command_imports_another_or_the_agent(name: str) -> None:
    """Shared code is in modules of its own; only `run` needs the agent."""
    modules = imported(f"c.cli.get_command(None, {name!r})")
    commands = {each.removeprefix("ebpflb.cli.") for each in modules if "ebpflb.cli." in each}
    assert commands <= SHARED | {name}
    tops = {".".join(each.split(".")[:2]) for each in modules}
    assert HEAVY & (tops | modules) == ({"ebpflb.lab", "yaml"} if name == "demo" else set())
    assert not any(each.startswith(("ebpflb.agent", "kubernetes.client.")) for each in modules)


def test_help_says_what_each_command_says() -> None:
    shown = " ".join(CliRunner().invoke(cli, ["--help"]).output.split())
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command and command.help
        assert f" {name} {' '.join(command.help.split()).partition('. ')[0].rstrip('.')}." in shown


def test_each_help_has_three_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples fit 80 columns, and use the command, or a subcommand, correctly."""
    monkeypatch.setattr(click.Path, "convert", lambda _, value, *__: value)  # need not be there
    for context in every_command():
        lines = context.get_help().splitlines()
        examples = [line.strip()[2:] for line in lines if line.startswith("  $ ")]
        assert len(examples) == 3, context.command_path
        for example in examples:
            assert f"{example} ".startswith(f"{context.command_path} ") and len(example) < 76
            command: click.Command | None = cli
            words, used = shlex.split(example)[1:], click.Context(cli)
            while isinstance(command, click.Group) and words and words[0][0] != "-":
                command = command.get_command(used, words.pop(0))
            assert command, example
            command.make_context("", words, parent=used)  # raises UsageError


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("servces", "No such command 'servces'."),
        ("audit", "'audit'. `ebpflb doctor` answers what it answered;"),
        ("services get", "Missing argument 'NAMESPACE/NAME'."),
        ("services get default/web:80", '"default/web:80" is not NAMESPACE/NAME'),
        ("flows list --service web", '"web" is not NAMESPACE/NAME'),
        ("flows list --client web", '"web" is not an IP address'),
        ("monitor --client web", '"web" is not an address or network'),
        ("explain web", '"web" is not ADDRESS:PORT[/tcp|udp|sctp] or NAMESPACE/NAME[:PORT], such'),
    ],
)
def test_wrong_uses(words: str, error: str) -> None:
    """One line says what is wrong with the arguments."""
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 2
    said = done.output.partition("Error: ")[2]
    assert error in said and len(said.splitlines()) == 1


def completed(*words: str) -> list[str]:
    """Return the completions that a shell gets for the last word."""
    complete = ShellComplete(cli, {}, "ebpflb", "_EBPFLB_COMPLETE")
    return [each.value for each in complete.get_completions(list(words[:-1]), words[-1])]


def test_completion_of_commands_and_maps() -> None:
    """A shell can complete the names of commands and of maps."""
    assert completed("se") == ["services"]
    assert completed("services", "g") == ["get"]
    assert completed("maps", "dump", "sl") == ["slots"]


def options_of(command: click.Command) -> list[click.Parameter]:
    """Return the options of a command and of its subcommands."""
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return [*command.params, *(each for one in inner for each in options_of(one))]


@pytest.mark.parametrize("name", COMMANDS)
def test_places_can_be_given_by_the_environment(name: str) -> None:
    """Every option with a path has a variable like EBPFLB_STATE_DIR, except kube-proxy's."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for each in options_of(command):
        if isinstance(each.type, click.Path) and each.name not in OF_KUBE_PROXY:
            assert each.envvar == f"EBPFLB_{str(each.name).upper()}"


def strings() -> Iterator[str]:
    """Yield the strings of the product, docstrings included."""
    package = Path(*cli_package.__path__).parent
    for path in package.rglob("*.py"):
        if not str(path.relative_to(package)).startswith(NAMES_OTHERS):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def options_by_name() -> set[str]:
    """Return the options of all commands by their names."""
    commands = (cli.get_command(click.Context(cli), name) for name in COMMANDS)
    options = [option for each in commands if each for option in options_of(each)]
    return {word for option in options for word in (*option.opts, *option.secondary_opts)}


def test_no_text_names_an_option_that_does_not_exist() -> None:
    """Every option that a text mentions exists."""
    named = {word for text in strings() for word in re.findall(r"(?<![\w-])--[a-z][\w-]+\w", text)}
    assert len(named) > 50
    assert named - options_by_name() <= OPTIONS_OF_OTHERS
