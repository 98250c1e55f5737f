# SPDX-License-Identifier: Apache-2.0
"""Run `ebpflb` with a demo that is named after this process, so that it touches no other demo."""

import os
import sys

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
