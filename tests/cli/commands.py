# SPDX-License-Identifier: Apache-2.0
"""Every command of the command line."""

from collections.abc import Iterator

import click

from ebpflb.cli import cli


def every_command(
    command: click.Command = cli, parent: click.Context | None = None, name: str = "ebpflb"
) -> Iterator[click.Context]:
    context = click.Context(command, parent, info_name=name)
    yield context
    if isinstance(command, click.Group):
        found = {
            each: command.get_command(context, each) for each in command.list_commands(context)
        }
        for each, one in found.items():
            if one:
                yield from every_command(one, context, each)
