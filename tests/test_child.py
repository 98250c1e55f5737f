# SPDX-License-Identifier: Apache-2.0
"""No child process loads files from the working directory or by environment variables."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ebpflb import child
from ebpflb.kernel.programs import compiler
from ebpflb.kernel.programs.compiler import compile_source
from tests.kernel.variants import SMALL_SOURCE

PACKAGE = Path(child.__file__).parent
MODULES = ("ebpflb", "msgspec", "bcc", "struct", "ctypes", "sitecustomize", "usercustomize")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory full of modules that leave a trace, and the trace's path."""
    folder, trace = tmp_path / "trap", tmp_path / "trace"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(folder)
    for variable in ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "BCC_KERNEL_SOURCE"):
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.setenv("PYTHONSTARTUP", str(folder / "ebpflb.py"))
    return trace


def test_the_compiler_loads_nothing_from_the_working_directory(trap: Path, tmp_path: Path) -> None:
    """The compiler loads nothing from there or from an environment variable's path, and works."""
    found = compile_source(SMALL_SOURCE, cache=tmp_path / "cache")
    assert not found.cached and found.programs
    assert not trap.exists()


def test_the_environment_is_closed(trap: Path) -> None:
    """A child gets only PATH and the language from the environment."""
    words = child.run(["env"]).stdout.split()
    assert {word.partition("=")[0] for word in words} == {"PATH", "LANG"}


def test_a_program_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that hangs is killed, and its thread continues with an error that names it."""
    monkeypatch.setattr(child, "SECONDS", 0.2)
    pid = tmp_path / "pid"
    with pytest.raises(TimeoutError, match=r"no answer in 0\.2 s: 'sh'"):
        child.run(["sh", "-c", f"echo $$ >{pid}; exec sleep 1000"])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_an_agent_of_the_lab_is_the_installed_one(tmp_path: Path) -> None:
    """The lab uses -P; without it `ebpflb demo` would run, as root, modules of the working
    directory.
    """
    (tmp_path / "ebpflb.py").write_text("print('trap')\n")
    command = [sys.executable, "-P", "-m", "ebpflb", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ebpflb, version")


def test_every_child_is_started_by_this_module() -> None:
    """Other callers set directory and environment themselves; -m is always used with -P."""
    others = {"kernel/programs/compiler.py", "lab/hosts.py"}
    starting = re.compile(r"subprocess\.(run|Popen|call|check_\w+)\(|os\.(system|popen|posix)")
    found = {
        str(path.relative_to(PACKAGE)): path.read_text()
        for path in PACKAGE.rglob("*.py")
        if starting.search(path.read_text())
    }
    assert found.keys() == others | {"child.py"}
    for name, text in found.items():
        is_closed = "child.environment()" in text or "def environment" in text
        assert is_closed or name == "lab/hosts.py"  # programs of the operator's own
        assert '"cwd": "/"' in text or 'cwd="/"' in text
    commands = [path.read_text() for path in PACKAGE.rglob("*.py")]
    assert not [text for text in commands if re.search(r'executable, "-m"', text)]
    assert vars(compiler)["child"] is child
