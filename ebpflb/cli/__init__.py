# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, call, print. One file a command; exit status 0 means yes."""

import sys

import click

from ebpflb.cli.check import check
from ebpflb.cli.cleanup import cleanup
from ebpflb.cli.demo import demo
from ebpflb.cli.flows import flows
from ebpflb.cli.maps import maps
from ebpflb.cli.run import run
from ebpflb.cli.status import status
from ebpflb.errors import EbpflbError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ebpflb", prog_name="ebpflb")
def cli() -> None:
    """A Kubernetes service load balancer in eBPF, beside any CNI."""


for command in (run, check, maps, flows, status, cleanup, demo):
    cli.add_command(command)


def main() -> None:
    """Expected failures are one line and exit status 1; anything else is a bug and shows itself."""
    try:
        cli(prog_name="ebpflb")
    except EbpflbError as error:
        click.echo(f"ebpflb: {error}", err=True)
        sys.exit(1)
