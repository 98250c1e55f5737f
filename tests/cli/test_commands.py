# SPDX-License-Identifier: Apache-2.0
"""The commands: each is imported when it is used."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from ebpflb.cli import COMMANDS, cli
from ebpflb.version import BUILD_DATE, COMMIT, VERSION
from tests.cli.conftest import NEVER, Ebpflb

OTHERS = ("ebpflb.cli.demo", "ebpflb.cli.explain", "ebpflb.lab", "kubernetes", "bcc")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_there(name: str) -> None:
    """By the name under which it is listed."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name


def test_version_names_commit_and_date() -> None:
    """`ebpflb version` shows the version, the commit that it was built from and that one's date."""
    shown = [line.split() for line in CliRunner().invoke(cli, ["version"]).output.splitlines()]
    assert shown == [["ebpflb", VERSION], ["commit", COMMIT], ["build", "date", BUILD_DATE]]


def test_an_agent_imports_only_what_it_uses() -> None:
    """No other command, and no Kubernetes client before it knows that there is an API server."""
    code = "import sys, ebpflb.cli as c; c.cli.get_command(None, 'run'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(OTHERS).isdisjoint(done.stdout.split())
    assert "ebpflb.agent.loop" in done.stdout.split()


def options_of(command: click.Command) -> list[click.Parameter]:
    """Also those of the commands that it has."""
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return [*command.params, *(each for one in inner for each in options_of(one))]


@pytest.mark.parametrize("name", COMMANDS)
def test_directories_can_be_given_by_the_environment(name: str) -> None:
    """EBPFLB_STATE_DIR and its like, for every command that has the option."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for each in options_of(command):
        if each.name in ("state_dir", "run_dir", "cache_dir", "cgroup_root", "manifests"):
            assert each.envvar == f"EBPFLB_{each.name.upper()}"


def test_a_command_looks_where_the_environment_says(
    ebpflb: Ebpflb, nowhere: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if its options said so."""
    said = ebpflb("status", *nowhere)
    assert str(NEVER) in said.out + said.err
    monkeypatch.setenv("EBPFLB_STATE_DIR", nowhere[1])
    monkeypatch.setenv("EBPFLB_RUN_DIR", nowhere[3])
    assert ebpflb("status") == said
