# SPDX-License-Identifier: Apache-2.0
"""docs/kube-proxy-parity.md names the engines with which pytest collects the tests."""

import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/kube-proxy-parity.md").read_text()
LISTED = {
    title: set(re.findall(r"`(test_\w+)`", text))
    for title, text in re.findall(r"^- \*([^*]+)\*(.*?)(?:; of these |$)", PAGE, re.M)
}
BOTH, FLOWS, SOCKETS = (LISTED[title] for title in ("both engines", "flow tables alone", "sockets"))


@pytest.fixture(scope="module")
def on_netfilter() -> set[str]:
    """The files that have tests with netfilter as a parameter."""
    files = [f"tests/network/{name}.py" for name in sorted(BOTH | FLOWS | SOCKETS)]
    files = [each for each in files if (ROOT / each).exists()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"^tests/network/(test_\w+)\.py::\w+\[.*netfilter", done.stdout, re.M))


def test_files_on_both_engines_are_listed_as_such(on_netfilter: set[str]) -> None:
    """All that are listed run on netfilter, and none of those that are said not to."""
    assert on_netfilter == BOTH
