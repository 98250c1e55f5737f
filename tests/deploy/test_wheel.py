# SPDX-License-Identifier: Apache-2.0
"""An installation from a wheel is complete, as the image and a bare machine have no checkout."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click import shell_completion

from ebpflb.cli import cli
from ebpflb.kernel import bpf
from ebpflb.kernel.maps import layout
from ebpflb.kernel.programs import compiler
from tests.cli.commands import every_command
from tests.kit import answers

CHECKOUT = Path(__file__).parents[2]
URL, TAG = "https://example.org/somebody/ebpflb", "v9.8.7"
COMPILING = """
import sys
from pathlib import Path
from ebpflb.kernel.maps import layout
from ebpflb.kernel.programs import compiler
for source in ("hooks/socket.c", "hooks/packet.c", "hooks/netns_cookie.c"):
    assert not compiler.compile_source(source, cache=Path(sys.argv[1])).cached
print(layout.SOURCES)
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=290,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def installed() -> Iterator[Path]:
    """Return a fresh environment with ebpflb from a wheel, and its dependencies from here.

    The sources are copied, because a build writes beside them; every user may read the copy,
    because the compiler runs as the user nobody.
    """
    with TemporaryDirectory(prefix="ebpflb-test-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        source, environment = path / "source", path / "environment"
        source.mkdir()
        for name in ("LICENSES", "bpf", "deploy/completion", "docs", "ebpflb"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(CHECKOUT / name, source / name, ignore=ignored)
        for name in (
            ".gitignore",
            "CHANGELOG.md",
            "README.md",
            "pyproject.toml",
            "setup.cfg",
            "setup.py",
        ):
            shutil.copy(CHECKOUT / name, source)
        commit(source)
        (source / "bytecode").mkdir()
        (source / "bytecode/compiled").touch()
        for text in (bpf.TEXT, layout.TEXT):
            bpf.write_declarations(text, source / "bytecode")
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        build = (sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", path)
        run(*build, source, env={**os.environ, "SOURCE_URL": URL})
        (archive,) = path.glob("*.tar.gz")
        run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", path, archive)
        run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", environment)
        (wheel,) = path.glob("*.whl")
        run(*pip, "--python", environment / "bin/python", "install", "--no-deps", wheel)
        shutil.rmtree(source)
        (own,) = environment.glob("lib/python*/site-packages")
        (own / "others.pth").write_text(sysconfig.get_path("purelib"))
        yield environment


def commit(source: Path) -> None:
    """Make a repository of a folder, with one tagged commit."""
    git = ("git", "-C", source, "-c", "user.name=test", "-c", "user.email=test@localhost")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "all"), ("tag", TAG)):
        run(*git, *words)


def elsewhere(installed: Path) -> dict[str, object]:
    """Return an environment outside the checkout. A .pth file names ebpflb's dependencies, because
    the compiler child ignores the environment.
    """
    return {"cwd": installed, "env": dict(os.environ)}


def test_version_and_commit_are_those_of_the_source_archive(installed: Path) -> None:
    """The wheel is built without git from the archive, and the archive from a tagged commit."""
    shown = run(installed / "bin/ebpflb", "version", **elsewhere(installed)).splitlines()
    assert shown[0] == f"ebpflb {TAG[1:]}"
    assert re.fullmatch("commit      [0-9a-f]{9}", shown[1])


def test_links_of_the_readme_are_absolute(installed: Path) -> None:
    """The README's links are absolute, because a package index shows it without the linked
    files.
    """
    (metadata,) = installed.glob("lib/python*/site-packages/ebpflb-*.dist-info/METADATA")
    text = metadata.read_text()
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert f"{URL}/blob/{TAG}/docs/install.md" in targets
    assert [it for it in targets if not it.startswith(("https://", "#"))] == []
    assert f"Project-URL: Source, {URL}" in text.splitlines()


def test_documentation_is_installed(installed: Path) -> None:
    """The help says where the pages are; these link to installed files or the repository."""
    told = run(installed / "bin/ebpflb", "--help", **elsewhere(installed))
    docs = installed / "share/doc/ebpflb/docs"
    assert f"Documentation: {docs}" in told
    assert {"install.md", "runbook.md"} <= {path.name for path in docs.iterdir()}
    for page in (*docs.iterdir(), docs.parent / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), page
    code = "from ebpflb.tools import canary_check as c, check as n; print(c._LOST, n._BY_HAND)"
    said = run(installed / "bin/python", "-c", code, **elsewhere(installed))
    assert f"{docs}/runbook.md" in said and f"{docs}/firewalls.md" in said


def test_no_text_names_a_page_of_a_checkout() -> None:
    """No message names a file of the checkout, because users have none."""
    for path in (CHECKOUT / "ebpflb").rglob("*.py"):
        parsed = ast.parse(path.read_text())
        notes = {id(node.value) for node in ast.walk(parsed) if isinstance(node, ast.Expr)}
        for node in ast.walk(parsed):
            if isinstance(node, ast.Constant) and id(node) not in notes:
                assert "docs/" not in str(node.value).replace("ebpflb/docs", ""), path
    for context in every_command():
        assert "docs/" not in (context.command.help or "")


def test_manual_page() -> None:
    """man(1) shows the help of every command."""
    source = run(sys.executable, CHECKOUT / "deploy/release/man.py", cwd=CHECKOUT)
    shown = run("man", "--warnings", "-l", "-", input=source, env={**os.environ, "MANWIDTH": "100"})
    assert "Documentation: /opt/ebpflb/share/doc/ebpflb/docs" in shown
    for context in every_command():
        assert f" {context.command_path}\n" in shown
        assert f"Usage: {context.command_path} " in shown


SHELLS = {
    "bash": "bash-completion/completions/ebpflb",
    "zsh": "zsh/site-functions/_ebpflb",
    "fish": "fish/vendor_completions.d/ebpflb.fish",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_shell_completion_is_installed_where_the_shell_looks(installed: Path, shell: str) -> None:
    """The file equals click's output for this shell."""
    wanted = shell_completion.get_completion_class(shell)
    assert wanted
    source = wanted(cli, {}, "ebpflb", "_EBPFLB_COMPLETE").source()
    assert (installed / "share" / SHELLS[shell]).read_text().rstrip() == source.rstrip()


def test_bash_completes_commands_and_maps(installed: Path) -> None:
    """bash reads the file when the word after ebpflb is completed."""
    script = """
        source share/bash-completion/completions/ebpflb
        COMP_WORDS=(ebpflb maps dump sl) COMP_CWORD=3
        _ebpflb_completion bin/ebpflb
        echo "${COMPREPLY[@]}"
    """
    assert run("bash", "-c", script, **elsewhere(installed)).split() == ["slots"]


def test_sources_come_along(installed: Path) -> None:
    """Every file of bpf/ is installed where ebpflb looks for it."""
    placed = installed / "share/ebpflb/bpf"
    found = {it.relative_to(placed) for it in placed.rglob("*") if it.is_file()}
    wanted = {it.relative_to(CHECKOUT / "bpf") for it in (CHECKOUT / "bpf").rglob("*.[ch]")}
    assert wanted <= found
    assert wanted


def test_bytecode_comes_along(installed: Path) -> None:
    """The bytecode of `make wheel` is installed where ebpflb looks first."""
    assert (installed / "share/ebpflb" / compiler.BROUGHT.name / "compiled").is_file()


def test_a_start_imports_no_parser_and_no_compiler(installed: Path) -> None:
    """cffi's tables are installed, so no command parses C; BCC and Kubernetes' client are imported
    on use.
    """
    code = "import sys, ebpflb.cli.run; print(*sys.modules)"
    modules = run(installed / "bin/python", "-c", code, **elsewhere(installed)).split()
    assert "ebpflb.kernel.maps.layout" in modules
    assert {"bcc", "cffi", "kubernetes.client.rest", "pycparser"}.isdisjoint(modules)


@pytest.mark.extended
def test_it_compiles(installed: Path, tmp_path: Path) -> None:
    """Each source of the datapath compiles from the installation."""
    python = installed / "bin/python"
    said = run(python, "-c", COMPILING, tmp_path / "cache", **elsewhere(installed))
    assert said.strip() == str(installed / "share/ebpflb/bpf")


@pytest.mark.skipif(os.geteuid() != 0, reason="bpf(2) is root's")
def test_it_checks(installed: Path) -> None:
    """The installed `ebpflb check` says that this node can run ebpflb."""
    command = installed / "bin/ebpflb", "check", "-o", "json"
    findings = answers.results(run(*command, **elsewhere(installed)))
    assert [it for it in findings if it["required"] and not it["ok"]] == []
    assert {"capabilities", "BCC"} <= {it["feature"] for it in findings}
