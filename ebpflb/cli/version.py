# SPDX-License-Identifier: Apache-2.0
"""``ebpflb version``: the version, its commit and its date."""

import click

from ebpflb.cli.output import Output, data_option, print_as
from ebpflb.version import BUILD_DATE, COMMIT, VERSION


@click.command()
@data_option
def version(output: Output) -> None:
    """Show the version, the commit that it was built from, and that commit's date.

    \b
    $ ebpflb version
    $ ebpflb version -o json
    $ ebpflb version -o yaml
    """
    if output.is_data:
        print_as(output, {"version": VERSION, "commit": COMMIT, "build_date": BUILD_DATE})
        return
    click.echo(f"ebpflb {VERSION}")
    click.echo(f"commit      {COMMIT}")
    click.echo(f"build date  {BUILD_DATE}")
