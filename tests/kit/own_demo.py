# SPDX-License-Identifier: Apache-2.0
"""Run `ebpflb` with a demo that is named after this process, so that it touches no other demo."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from ebpflb.kernel.attach.cgroup_links import cgroup_root
from ebpflb.kernel.maps.state_dir import BPFFS
from ebpflb.lab.netns import NETNS

PREFIX = f"ebpflb-test-{os.getpid()}-demo"
# SIGINT as in a terminal: a shell that starts the tests in the background has it ignored.
CODE = f"""
import importlib, signal
from ebpflb.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
demo = importlib.import_module("ebpflb.cli.demo")
assert demo.DEMO_PREFIX
demo.DEMO_PREFIX = {PREFIX!r}
main()
"""
EBPFLB = [sys.executable, "-u", "-c", CODE]


def processes(session: int) -> list[str]:
    """Return the living processes of a session; dead processes belong to init."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found.append(stat.read_text())
    fields = [(text, text.rpartition(")")[2].split()) for text in found]
    return [text for text, (state, _, _, its, *_) in fields if int(its) == session and state != "Z"]


def left(session: int) -> list[object]:
    """Return everything that is left of a demo."""
    return [*processes(session), *places()]


def places() -> list[Path]:
    """Return everything that has the demo's name."""
    folders = (NETNS, cgroup_root(), BPFFS, Path("/run"), Path("/tmp"))
    return [it for folder in folders for it in folder.glob(f"{PREFIX}*")]
