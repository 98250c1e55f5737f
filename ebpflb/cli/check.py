# SPDX-License-Identifier: Apache-2.0
"""``ebpflb check``: can this node run it, feature by feature."""

import sys
from pathlib import Path
from typing import Any

import click

from ebpflb.cli import common
from ebpflb.cli.output import show, table
from ebpflb.diagnose.check import Finding
from ebpflb.diagnose.check import check as findings_of


@click.command()
@common.cgroup_root
@common.state_dir
@common.output
def check(cgroup_root: Path | None, state_dir: Path, output: str) -> None:
    """Can this node run it? Exit status 0 means yes.

    Every feature is tried, and where one is missing it is said what to do or what is lost.
    """
    findings = findings_of(state_dir.absolute(), cgroup_root)
    if output == "table":
        table("this node", [_row(finding) for finding in findings])
    else:
        show([finding._asdict() for finding in findings], output)
    sys.exit(0 if all(finding.ok for finding in findings if finding.required) else 1)


def _row(finding: Finding) -> dict[str, Any]:
    answer = "ok" if finding.ok else ("MISSING" if finding.required else "no")
    return {
        "feature": finding.feature,
        "": answer,
        "found": finding.detail,
        "what to do, or what is lost": finding.remedy,
    }
