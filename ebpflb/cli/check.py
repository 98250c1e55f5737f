# SPDX-License-Identifier: Apache-2.0
"""``ebpflb check``: whether this node can run ebpflb, feature by feature."""

import sys
from pathlib import Path
from typing import Any

import click

from ebpflb.cli import common
from ebpflb.cli.output import output_option, print_as, print_table
from ebpflb.diagnose.check import CheckResult, check_node


@click.command()
@common.cgroup_root
@common.state_dir
@output_option
def check(cgroup_root: Path | None, state_dir: Path, output: str) -> None:
    """Check whether this node can run ebpflb.

    Tries every feature that ebpflb uses. For each one that is missing, prints what to do about it
    or what does not work without it. Exit status 0 if nothing required is missing.
    """
    results = check_node(state_dir.absolute(), cgroup_root)
    if output == "table":
        print_table("this node", [_row(result) for result in results])
    else:
        print_as(output, [result._asdict() for result in results])
    sys.exit(0 if all(result.ok for result in results if result.required) else 1)


def _row(result: CheckResult) -> dict[str, Any]:
    status = "ok" if result.ok else ("MISSING" if result.required else "warning")
    return {
        "feature": result.feature,
        "status": status,
        "detail": result.detail,
        "remedy or consequence": result.remedy,
    }
