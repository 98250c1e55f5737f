# SPDX-License-Identifier: Apache-2.0
"""requirements/ locks every installed version, with hashes: `make lock` writes it."""

import configparser
import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILES = {name: ROOT / f"requirements/{name}.txt" for name in ("run", "ui", "test")}
WITH_HASHES = "--require-hashes --only-binary :all: --requirement"
WITHOUT_OTHERS = "--no-deps --no-build-isolation"


def locked(name: str) -> dict[str, str]:
    """Return the locked versions by package, for packages that this platform installs."""
    text = re.sub(r"(?m)^ +.*\n", "", FILES[name].read_text())
    lines = [line.rstrip(" \\") for line in text.splitlines() if line and line[0] != "#"]
    pinned = [Requirement(line) for line in lines]
    return {
        canonicalize_name(it.name): str(it.specifier).removeprefix("==")
        for it in pinned
        if it.marker is None or it.marker.evaluate()
    }


def asked_for(name: str) -> list[Requirement]:
    """Return the requirements in setup.cfg and pyproject.toml."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].split("\n")
    for extra in {"run": (), "ui": ("ui",), "test": ("ui", "test")}[name]:
        lines += setup["options.extras_require"][extra].split("\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines += project["build-system"]["requires"]
    return [Requirement(line) for line in lines if line]


def needed_by(package: str) -> list[Requirement]:
    """Return the requirements of an installed package on this machine."""
    every = [Requirement(line) for line in requires(package) or ()]
    return [it for it in every if it.marker is None or it.marker.evaluate({"extra": ""})]


@pytest.mark.parametrize("name", FILES)
def test_what_is_asked_for_is_locked(name: str) -> None:
    """Each requirement is locked in a version that setup.cfg allows."""
    versions = locked(name)
    for wanted in asked_for(name):
        assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), wanted


@pytest.mark.parametrize("name", FILES)
def test_what_that_needs_is_locked_too(name: str) -> None:
    """The requirements' own requirements are locked too, in versions that the packages allow.

    pip refuses a lock that lacks a requirement.
    """
    versions = locked(name)
    for package in versions:
        for wanted in needed_by(package):
            found = versions[canonicalize_name(wanted.name)]
            assert wanted.specifier.contains(found, prereleases=True), (package, wanted)


@pytest.mark.parametrize("name", FILES)
def test_every_line_has_hashes(name: str) -> None:
    """Every line has SHA-256 hashes, so that no index can give another file."""
    entries = re.split(r"(?m)^(?=[a-z0-9])", re.sub(r"(?m)^ *#.*\n", "", FILES[name].read_text()))
    assert len(entries) > 10
    assert all(re.search(r"\n +--hash=sha256:[0-9a-f]{64}\b", it) for it in entries if it.strip())


def test_tests_run_with_what_the_image_has() -> None:
    """All locks have the same versions, so tests run with those of the image."""
    assert locked("run").items() <= locked("ui").items() <= locked("test").items()


def test_what_is_installed_is_what_is_locked() -> None:
    """The environment that runs these tests, which `make test` makes, has the locked versions."""
    found = {}
    for package in locked("test"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    assert found == locked("test")


@pytest.mark.parametrize(
    "user", ["Makefile", "deploy/release/environment", "docs/install.md"], ids=lambda name: name
)
def test_everything_is_installed_from_a_lock(user: str) -> None:
    """Each pip line installs first the lock, then ebpflb without its dependencies."""
    text = (
        (ROOT / user)
        .read_text()
        .replace("\\\n", " ")
        .replace("&&", "\n")
        .replace("$(PIP_INSTALL)", "pip install")
    )
    lines = [" ".join(it.split()) for it in re.findall(r"(?<!= \$\(BIN\)/)pip install (.*)", text)]
    installing = [line for line in lines if "uv>=" not in line]
    assert [WITH_HASHES in line for line in installing] == [True, False]
    is_built = ".whl" not in installing[1]
    assert (WITHOUT_OTHERS if is_built else "--no-deps ") in installing[1]
