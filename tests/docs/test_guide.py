# SPDX-License-Identifier: Apache-2.0
"""The console blocks of README and guide run in a kept demo, and print what the pages show.

Output is compared by shape: numbers, times and the widths of columns differ from run to run.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpflb.lab.agents import wait_until
from tests.kit import terminal
from tests.kit.own_demo import EBPFLB, left

_ROOT = Path(__file__).parents[2]
PAGES = (_ROOT / "README.md", _ROOT / "docs/getting-started.md")
MARK = "---- end of command"
COLUMNS = 80
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the demo needs root")
KEEP_SECONDS, SHELL_SECONDS = 240, 120  # a quiet machine takes 10 and 25
# Functions of the shell come before programs; a busy machine gets twice the time to apply a change,
# and a command that says so is run again.
FUNCTIONS = f"""
ebpflb() {{
  [ "$1" = explain ] || {{ {shlex.join(EBPFLB)} "$@"; return; }}
  local said
  while said=$({shlex.join(EBPFLB)} "$@" 2>&1) && [[ $said == *"command again"* ]]; do :; done
  echo "$said"
}}
sleep() {{ command sleep $(( $1 * 2 )); }}
"""


class Step(NamedTuple):
    """A command, with the lines of its here-document, and the lines that it prints."""

    command: str
    output: list[str]


def steps(page: str) -> list[Step]:
    """Return all commands of the page's console blocks, in their order."""
    found: list[Step] = []
    for block in re.findall(r"(?ms)^```console\n(.*?)^```", page):
        end = ""  # of a here-document
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Step(line[2:], []))
                end = "END" if line.endswith("<<END") else ""
            elif end:
                found[-1] = Step(f"{found[-1].command}\n{line}", [])
                end = "" if line == end else end
            else:
                found[-1].output.append(line)
    return found


def shape(line: str) -> str:
    """Return the line without the parts that differ between runs."""
    line = re.sub(r"\d+ (s|min|h)\b", "0 s", line)
    # An agent takes the objects of a new file in one turn, or in two: then the last is the cause.
    line = line.replace("EndpointSlice default/api-1 changed (+1)", "Service default/api changed")
    line = re.sub(r"\d[\d.]*", "0", line)
    return " ".join(line.split())


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    """Keep a demo, return what it shows on a terminal, and remove it afterwards."""
    with terminal.opened(COLUMNS) as (screen, out):
        kept = subprocess.Popen([*EBPFLB, "demo", "--keep"], stdout=out, start_new_session=True)
        out.close()
        shown = terminal.read(screen)
    assert kept.wait(KEEP_SECONDS) == 0
    yield shown
    subprocess.run(
        [*EBPFLB, "demo", "--remove"], check=True, stdout=subprocess.DEVNULL, timeout=KEEP_SECONDS
    )
    wait_until("nothing is left", lambda: not left(kept.pid))


@needs_root
def test_the_demo_to_the_end(demo: str) -> None:
    """All steps run on a terminal, and connections reach every endpoint."""
    said = re.sub(r"\x1b\[\d*m", "", demo)
    assert "\x1b[1m\n# set-up" in demo and "\x1b[36m  $ ebpflb explain" in demo, "colours"
    for name in ("web-1", "web-2", "web-3", "web-4"):
        assert name in said
    assert "far-1 saw 192.0.2.1\n" in said, "policy Cluster sends us to the other node as the node"
    assert said.count("web-1 saw 198.51.100.7\n") == 3, "an endpoint here sees us, by any policy"
    assert "far-1 saw 198.51.100.7\n" in said, "we are handed to the other node"
    assert [line for line in said.splitlines() if len(line) > COLUMNS] == []
    log = section(said, "set-up").partition("of its log:\n")[2].splitlines()
    assert [line.split()[0] for line in log if line] == ["programs", "packet", "serving"]
    moved = section(said, "a load balancer address")
    assert re.findall(r"192.0.2.211 is answered for by node (\w+)", moved) == ["third", "other"]
    assert re.search(r"its cable is pulled -> first connection: \d+\.\d s", moved)
    assert "all is kept" in said
    assert "packet path: netfilter" in said, "the default engine: the bridge has hairpin mode"
    flow = r"TCP +\w+ +198.51.100.7:\d+ +192.0.2.1:30090 +10.244.1.1"
    assert re.search(flow, section(said, "a client outside"))


def section(said: str, heading: str) -> str:
    """Return the text after the heading with these words."""
    return next(it for it in said.split("\n# ") if heading in it.partition("\n")[0])


def test_a_here_document_belongs_to_its_command() -> None:
    page = "```console\n$ cat <<END\na\nEND\n$ date\nnow\n```\n```\n$ no\n```\n"
    assert steps(page) == [Step("cat <<END\na\nEND", []), Step("date", ["now"])]


@pytest.mark.timeout(KEEP_SECONDS + SHELL_SECONDS)
@needs_root
def test_the_pages_run_as_printed(demo: str, tmp_path: Path) -> None:
    """Each command prints lines of the shape that the page shows, in this order.

    Before, a writer in the shell ends without a word when its reader has ended.
    """
    pages = [steps(page.read_text()) for page in PAGES]
    assert all(pages)
    wanted = [Step("yes | head -1", ["y"]), *(step for page in pages for step in page)]
    commands = [f"{it.command}\necho; echo '{MARK}'\n" for it in wanted]
    script = f"exec 2>&1{FUNCTIONS}{''.join(commands)}"
    shown = tmp_path / "shown"  # a pipe would stay open as long as the connections that wait
    with shown.open("w") as out:
        subprocess.run(
            [*EBPFLB, "demo", "shell"],
            input=f"{script}kill $(jobs -p)\n",
            env={**os.environ, "SHELL": "/bin/bash"},
            stdout=out,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=SHELL_SECONDS,
            check=False,
        )
    said = shown.read_text()
    parts = said.split(f"\n{MARK}\n")
    assert len(parts) == len(wanted) + 1, said
    for step, part in zip(wanted, parts, strict=False):
        lines = [line for line in map(shape, part.splitlines()) if line]
        assert lines == [line for line in map(shape, step.output) if line], (step.command, part)
