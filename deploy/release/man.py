# SPDX-License-Identifier: Apache-2.0
"""Prints the manual page ebpflb(8): the help of every command, as `ebpflb help` prints it."""

import os
from collections.abc import Iterator

import click

from ebpflb.cli import cli
from ebpflb.files import DOCS

PLACE = "/opt/ebpflb/share/doc/ebpflb/docs"  # of the documentation, in the package
HEAD = r"""\
.TH EBPFLB 8 "" "ebpflb" "System Administration"
.SH NAME
ebpflb \- Kubernetes service load balancer in eBPF
.SH COMMANDS"""


def sections(command: click.Command, words: str, parent: click.Context | None) -> Iterator[str]:
    """The command's section, and those of the commands that it has."""
    context = click.Context(command, parent, info_name=words.rpartition(" ")[2])
    text = command.get_help(context).replace(str(DOCS), PLACE)
    text = text.replace("\\", r"\e").replace("-", r"\-")
    lines = (rf"\&{line}" for line in text.splitlines())
    yield "\n".join([f".SS {words}", ".nf", *lines, ".fi"])
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        found = command.get_command(context, name)
        assert found
        yield from sections(found, f"{words} {name}", context)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "78"
    print("\n".join([HEAD, *sections(cli, "ebpflb", None)]))
