# SPDX-License-Identifier: Apache-2.0
"""Configurations in the shapes that distributions write: loaded or refused, as by kube-proxy."""

from operator import itemgetter
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from ebpflb.cli import run_options
from ebpflb.cli.run import run
from ebpflb.config.translation import translate
from ebpflb.errors import ConfigurationError

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
ROWS = yaml.safe_load(Path(__file__).with_name("decisions.yaml").read_text())
FLAGS = [row for row in ROWS if "flags" in row]
FILES = [row for row in ROWS if "flags" not in row]


def decided(words: list[str]) -> dict[str, Any] | str:
    """The options; or the last line of the error."""
    try:
        values = run.make_context("run", words).params
        return translate(run_options.load(values))
    except click.UsageError as error:
        return error.format_message()
    except ConfigurationError as error:
        return str(error).splitlines()[-1].partition("config.conf: ")[2]


def check(words: list[str], decision: dict[str, str] | str) -> None:
    found = decided(words)
    if isinstance(decision, str):
        assert isinstance(found, str) and found.startswith(decision), found
        return
    assert isinstance(found, dict), found
    for path, text in decision.items():
        name, _, inner = path.partition(".")
        value = getattr(found[name], inner) if inner else found[name]
        assert str(value) == text, path


@pytest.mark.parametrize("row", FILES, ids=itemgetter("case"))
def test_files(tmp_path: Path, row: dict[str, Any]) -> None:
    """The fields of a file, or the file as such."""
    text = HEAD + row["fields"] if "fields" in row else row["file"]
    (tmp_path / "config.conf").write_bytes(text.encode())
    check([f"--config={tmp_path}/config.conf"], row["decision"])


@pytest.mark.parametrize("row", FLAGS, ids=itemgetter("case"))
def test_flags(row: dict[str, Any]) -> None:
    """Instead of a file."""
    check(row["flags"].split(), row["decision"])
