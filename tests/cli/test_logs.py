# SPDX-License-Identifier: Apache-2.0
"""The agent's log: its lines as text and JSON, and signals that change it."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ebpflb import redaction
from ebpflb.cli import logs
from tests.cli.conftest import NEVER

SECRET = 'tok"en-of-a-robot'
HANGS = """
import ctypes, logging
from ebpflb.cli import logs
logs.set_up("json")
logs.act_on_signals()
logging.getLogger("any").warning("ready")
ctypes.CDLL(None).pause()
"""
FAILS = """
import sys
from importlib import import_module
from ebpflb.cli import main
from ebpflb.errors import NodeError
def require_features(*_):
    raise NodeError("this node lacks\\n  all")
import_module("ebpflb.cli.run").require_features = require_features
sys.argv = WORDS
main()
"""


def python(code: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a process that runs this code; its log is a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_credential_plugins_failure_is_logged_in_words() -> None:
    """The Kubernetes client reports the failure to the root logger, in Python's words."""
    record = logging.LogRecord("root", 40, "", 0, "[Errno 2] No such file: '/x'", None, None)
    assert logs.name_api_credentials(record)
    assert record.getMessage() == "API credentials: No such file: '/x'"


def test_times_in_the_log() -> None:
    """Times are RFC 3339 with the offset of the local zone, as every command prints them."""
    code = (
        "import logging; from ebpflb.cli import logs; logs.set_up('text');"
        " logging.getLogger('any').warning('a line')"
    )
    with python(code, TZ="XYZ-05:30") as process:
        _, said = process.communicate()
    form = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+05:30 W a line\n"
    assert re.fullmatch(form, said)


def test_a_record_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is one line with Kubernetes' keys, whatever the message holds; secrets in it are
    hidden.
    """
    monkeypatch.setattr(redaction, "known_secrets", {})
    redaction.remember(SECRET)
    try:
        raise ValueError(f"{SECRET}\nand more")
    except ValueError:
        error: Any = sys.exc_info()
    record = logging.LogRecord("any", 40, "/x/part.py", 7, "is %s\n", (SECRET,), error)
    record.created = 1764400000.25
    line = logs.JsonFormatter().format(record)
    assert "\n" not in line and "robot" not in line
    said = json.loads(line)
    assert said.pop("err").endswith("ValueError: ***\nand more")
    assert said == {
        "ts": 1764400000250.0, "level": "error", "caller": "part.py:7", "msg": "is ***\n", "v": 0,
    }  # fmt: skip


def test_every_line_of_a_failed_start_is_json(tmp_path: Path) -> None:
    """The error that ends the agent is JSON too."""
    where = ["--state-dir", NEVER, "--run-dir", tmp_path, "--manifests", tmp_path]
    words = ["--logging-format=json", "--conntrack-min=1", "--kube-api-qps=1", "-v4", *where]
    with python(f"WORDS = {[*map(str, ['ebpflb', 'run', *words])]!r}\n{FAILS}") as process:
        _, said = process.communicate()
    lines = [json.loads(line) for line in said.splitlines()]
    assert process.returncode == 1
    assert "--kube-api-qps" in lines[0]["msg"]
    assert (lines[-1]["level"], lines[-1]["msg"]) == ("critical", "this node lacks\n  all")
    assert "err" not in lines[-1]


def test_signals_of_an_agent_that_hangs() -> None:
    """SIGUSR1 logs every stack even during a system call of the main thread; SIGUSR2 turns debug
    logging on, and off again.
    """
    with python(HANGS) as process:
        assert process.stderr

        def next_line() -> str:
            assert process.stderr
            return str(json.loads(process.stderr.readline())["msg"])

        try:
            assert next_line() == "ready"
            process.send_signal(signal.SIGUSR2)
            assert next_line() == "SIGUSR2: details are logged now"
            process.send_signal(signal.SIGUSR2)
            assert next_line() == "SIGUSR2: details are no longer logged"
            process.send_signal(signal.SIGUSR1)
            stacks = next_line() + next_line()
        finally:
            process.kill()
    assert "thread signals:" in stacks
    assert re.search(r"thread MainThread:\n.*line 7, in <module>", stacks)
