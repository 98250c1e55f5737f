# SPDX-License-Identifier: Apache-2.0
"""``ebpflb version``: the version, its commit and its date."""

import click

from ebpflb.version import BUILD_DATE, COMMIT, VERSION


@click.command()
def version() -> None:
    """Show the version, the commit that it was built from, and that commit's date."""
    click.echo(f"ebpflb {VERSION}")
    click.echo(f"commit      {COMMIT}")
    click.echo(f"build date  {BUILD_DATE}")
