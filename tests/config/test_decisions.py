# SPDX-License-Identifier: Apache-2.0
"""Files and flags as distributions write them, and at the limits of each field: the agent's
options, or the error, as with kube-proxy (kube-proxy.md 15).
"""

import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from ebpflb.cli import run_options
from ebpflb.cli.run import run
from ebpflb.config.translation import translate
from ebpflb.errors import ConfigurationError
from tests.config.files import DECISIONS, HEAD


def decided(words: list[str]) -> dict[str, Any] | str:
    """Return the options, or the error's lines."""
    try:
        values = run.make_context("run", words).params
        return translate(run_options.load(values))
    except click.UsageError as error:
        return error.format_message()
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("row", DECISIONS, ids=lambda row: row.get("case") or str(row))
def test_an_input_leads_to_these_options_or_errors(tmp_path: Path, row: dict[str, Any]) -> None:
    """The input is the fields of a file, a whole file, or flags."""
    file, decision = tmp_path / "config.conf", row["decision"]
    text = yaml.safe_dump(HEAD) + row["fields"] if "fields" in row else row.get("file", "")
    file.write_bytes(text.encode())
    found = decided(shlex.split(row["flags"]) if "flags" in row else [f"--config={file}"])
    if isinstance(decision, str):
        assert isinstance(found, str), found
        lines = [line.strip().removeprefix(f"{file}: ") for line in found.splitlines()]
        assert any(line.startswith(decision) for line in lines), lines
        return
    assert isinstance(found, dict), found
    for path, shown in decision.items():
        name, _, inner = path.partition(".")
        value = getattr(found[name], inner) if inner else found[name]
        assert str(value) == shown, path
