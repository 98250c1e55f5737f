# SPDX-License-Identifier: Apache-2.0
"""Any value of an option of `ebpflb run` works, or the error says what is wrong."""

import re
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from ebpflb.cli import logs
from ebpflb.cli.run import run
from ebpflb.errors import LONGEST_LINE
from ebpflb.kernel.node import sysctls
from ebpflb.serve import status
from tests.cli.conftest import NEVER, Ebpflb

OPTIONS = sorted(
    option
    for each in run.params
    if isinstance(each, click.Option) and not each.is_flag and each.name != "write_config_to"
    for option in each.opts
    if option.startswith("--")
)
ODD = (
    *("", " ", "-", "=", ",", ",,", "a,,b", "a=b", "0", "-1", "1", "65536", "9" * 30, "9" * 9999),
    *("1-2", "²-³", "1e400", "nan", "true", "\x1b[31m", "\u202e", "\udcff", "x" * 9999, "~", "%s"),
    *(
        "0.0.0.0",
        "0.0.0.0:0",
        ":10256",
        "[::]:1",
        "[::1:1",
        "::1",
        "[fe80::1%eth0]:80",
        "10.0.0.1/8",
    ),
    *(
        "10.0.0.0/8,10.0.0.0/8",
        "::/0",
        "1h",
        "1h1h",
        "-1s",
        "9999999999999h",
        "0x",
        "0x1/0x0",
        "1_0",
    ),
    *("/", "/dev/null", "/dev/zero", "/nowhere", "/proc/self/mem", "/etc/passwd/x", "*", "!*", "["),
    *("http://", "http://x:99999999", "http://[", "https://u:p@h", "a in (", "!a=b", "flows=²"),
    *("A=true,A=false", "flows=16777217", "flows=2000000,flows=3000000", "A=", "*=1"),
)
PYTHONS = re.compile(r"Traceback|Errno|Error\(|object at|literal|codec|None|\b(int|str|bool)\b")


@pytest.fixture
def serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run only the parsing of options."""
    module = import_module("ebpflb.cli.run")
    for name in ("serve_until_stopped", "require_features"):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(logs, "set_up", lambda _: None)
    monkeypatch.setattr(import_module("ebpflb.cli.cleanup"), "remove_all", lambda *_: None)
    monkeypatch.setattr(sysctls, "set_up_conntrack", lambda *_: None)
    monkeypatch.setattr(status, "held", nullcontext)


@pytest.mark.usefixtures("serves_nothing")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    chosen=some.lists(some.sampled_from(OPTIONS), min_size=1, max_size=3, unique=True),
    value=some.sampled_from(ODD)
    | some.text(some.characters(exclude_characters="\0", codec="utf-8")),
)
def test_any_value(ebpflb: Ebpflb, tmp_path: Path, chosen: list[str], value: str) -> None:
    """Up to three options get odd values at once; no error text shows Python's words."""
    given = [f"{option}={value}" for option in chosen]
    done = ebpflb("run", "--state-dir", NEVER, "--run-dir", tmp_path / "run", *given)
    assert done.status in (0, 1, 2)
    assert bool(done.status) == bool(done.err), done
    if not PYTHONS.search(value):
        assert not PYTHONS.search(done.err), done
    assert all(len(line) < len(value) + LONGEST_LINE for line in done.err.splitlines())
    assert "\x1b" not in done.err
