# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command has a module of its name; it parses options, calls, and prints.

How the options of ``ebpflb run`` become the agent's ``Options``:

run_options        the options as click knows them: kube-proxy's flags and ebpflb's own
run_configuration  their values, or the file of --config -> a valid KubeProxyConfiguration
run                that configuration and ebpflb's own options -> Options, for the agent

Shared by the commands:

common             options and helpers
output             -o table, json or yaml

The other commands:

check              whether this node can run ebpflb
cleanup            remove ebpflb, or what kube-proxy left behind
demo               a small cluster on this machine
flows              list and delete flows
maps               dump the maps
status             the state of the agent and of the hooks
"""

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
    """A Kubernetes service load balancer in eBPF that replaces kube-proxy, with any CNI."""


for command in (run, check, maps, flows, status, cleanup, demo):
    cli.add_command(command)


def main() -> None:
    """Prints expected errors as one line and exits with status 1. Any other exception is a bug, and
    its traceback is printed.
    """
    try:
        cli(prog_name="ebpflb")
    except EbpflbError as error:
        click.echo(f"ebpflb: {error}", err=True)
        sys.exit(1)
