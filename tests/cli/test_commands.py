# SPDX-License-Identifier: Apache-2.0
"""The commands: each is imported when it is used."""

import subprocess
import sys

import click
import pytest

from ebpflb.cli import COMMANDS, cli

OTHERS = ("ebpflb.cli.demo", "ebpflb.cli.explain", "ebpflb.lab", "kubernetes", "bcc")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_there(name: str) -> None:
    """By the name under which it is listed."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name


def test_an_agent_imports_only_what_it_uses() -> None:
    """No other command, and no Kubernetes client before it knows that there is an API server."""
    code = "import sys, ebpflb.cli as c; c.cli.get_command(None, 'run'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(OTHERS).isdisjoint(done.stdout.split())
    assert "ebpflb.agent.loop" in done.stdout.split()
