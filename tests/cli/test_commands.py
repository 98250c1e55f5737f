# SPDX-License-Identifier: Apache-2.0
"""The commands: each is imported when it is used."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from ebpflb.cli import COMMANDS, cli
from ebpflb.version import BUILD_DATE, COMMIT, VERSION

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
