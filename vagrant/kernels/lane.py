# SPDX-License-Identifier: Apache-2.0
"""Run tests on every kernel, those of lane_tests.py or others, and report the results.

`make test-kernel KERNEL=5.10 TESTS=tests/network` runs all of a folder with all parameters. Only
one test compiles inside: bytecode is brought along.
"""

import os
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from vagrant.kernels import archive, arm64, boot_files, machine
from vagrant.kernels.errors import LabError
from vagrant.kernels.lane_tests import ALL_TESTS, ARM64_TESTS, BUDGET, MORE, NETWORK, PACKET, TESTS
from vagrant.kernels.listing import Kernel

CACHE = Path(os.environ.get("EBPFLB_KERNELS") or Path.home() / ".cache" / "ebpflb-kernels")
BYTECODE = CACHE / "bytecode"  # by this machine's BCC
OTHER_BYTECODE = CACHE / "other-bytecode"  # by the other distribution's (vagrant/bcc)
RESULTS = Path("build/kernels")
AT_ONCE = 3  # on two cores: each uses one, most of the time
LIMIT, ALL_LIMIT = 2400.0, 5400.0  # seconds for one kernel, emulated
LOAD, OTHER_LOAD = 0.02, 0.2  # what a load is to be scaled to; the same, if other tests are named
TIMEOUT = 600  # seconds for one test
OUT = "/run/out"  # results, inside
PLUGINS = (
    "-p",
    "no:cacheprovider",
    "-p",
    "vagrant.kernels.parameter_sets",
)
Say = Callable[[str], None]


class Outcome(NamedTuple):
    """The result on one kernel: ``error`` is "" if all tests passed."""

    kernel: Kernel
    error: str
    summary: str


def folder(kernel: Kernel) -> Path:
    """The folder of the kernel's package and images."""
    made = CACHE / kernel.name
    made.mkdir(parents=True, exist_ok=True)
    return made


def bootable(kernel: Kernel) -> Path:
    """The folder to boot from; downloads and creates it if it does not exist."""
    package = archive.fetch(kernel, folder(kernel))
    if not is_foreign(kernel):
        return boot_files.prepare(package)
    root = arm64.root(folder(kernel))
    arm64.bring(root, BYTECODE)
    return boot_files.prepare(package, root)


def is_foreign(kernel: Kernel) -> bool:
    """Whether it cannot run this machine's programs."""
    return kernel.architecture != "amd64"


def prime(tests: Sequence[str]) -> None:
    """Compile outside what would take long inside: our programs, and Python's bytecode.

    PYTHONDONTWRITEBYTECODE is unset: else agents and tests would be compiled at every start.
    """
    python = test_python()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for command in (
        [python, "-m", "compileall", "-q", "ebpflb"],
        [python, "-m", "vagrant.kernels.bytecode", str(BYTECODE)],
        [python, "-m", "pytest", "-qq", "--collect-only", *PLUGINS, *tests],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            lines = (done.stderr + done.stdout).strip()
            raise LabError(f"{shlex.join(command[:4])} failed:\n{machine.last_lines(lines)}")


def show_here() -> None:
    """Print what this machine's own kernel processes: never checked, as CI's kernels differ."""
    subprocess.run([test_python(), "-m", "vagrant.kernels.verifier"], check=False)


def test_all(
    kernels: Sequence[Kernel],
    tests: Sequence[str],
    environment: str = "",
    bytecode: Path = BYTECODE,
) -> list[Outcome]:
    """Test every kernel, AT_ONCE at a time; lines of output are marked with the kernel."""
    machine.is_root()
    prime(tests)
    images = [bootable(kernel) for kernel in kernels]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        jobs = [
            pool.submit(
                _test, kernel, made, share(tests, place, len(kernels)), environment, bytecode
            )
            for place, (kernel, made) in enumerate(zip(kernels, images, strict=True))
        ]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            machine.end_all()
            raise


def share(tests: Sequence[str], place: int, count: int) -> Sequence[str]:
    """Return the kernel's part of TESTS, by its place among this many (lane_tests)."""
    if tests != TESTS:
        return tests
    network = [word for word in tests if word.startswith(NETWORK)]
    kept = {*network[place::count]}
    return (
        *(word for word in tests if word in kept or word not in network),
        f"--in-turns={place}/{count}:{PACKET}",
    )


def _is_listed(tests: Sequence[str]) -> bool:
    """Whether these are the listed tests, not named by someone."""
    return any(tuple(tests[: len(each)]) == each for each in (TESTS, ALL_TESTS, MORE, ARM64_TESTS))


def _test(
    kernel: Kernel, made: Path, tests: Sequence[str], environment: str, bytecode: Path
) -> Outcome:
    def say(line: str) -> None:
        print(f"{kernel.name:5}| {line}", flush=True)

    limit = LIMIT if tests[: len(TESTS)] == TESTS or tests == [BUDGET] else ALL_LIMIT
    with machine.output_folder(CACHE / "runs", kernel.name) as out:
        command = inside(kernel, tests, environment, bytecode)
        result = machine.run(made, out, command, limit=limit, say=say)
        _keep(kernel, out)
        return judge(kernel, result)


def inside(
    kernel: Kernel, tests: Sequence[str], environment: str = "", bytecode: Path = BYTECODE
) -> str:
    """Return the shell command that runs tests in the machine that QEMU boots here."""
    if is_foreign(kernel):
        return _tests(kernel, tests, environment)
    compiled = shlex.quote(str(bytecode))
    copy = f"rm -rf bytecode && cp -r {compiled} bytecode"  # compiler.BROUGHT, copy-on-write
    return f"{copy} && PYTHONDONTWRITEBYTECODE=1 {_tests(kernel, tests, environment)}"


def here(kernel: Kernel, tests: Sequence[str]) -> int:
    """Run tests on this machine's own kernel; return pytest's status (vagrant/provision/kernel).

    The output of `precompile` in compiler.BROUGHT comes with the checkout, or is made first.
    """
    machine.is_root()
    Path(OUT).mkdir(exist_ok=True)
    compiled = f"{test_python()} -m ebpflb.kernel.programs.precompile"
    command = f"{{ [ -e bytecode ] || {compiled}; }} && {_tests(kernel, tests, '')}"
    return subprocess.run(["sh", "-c", command], check=False).returncode


def _tests(kernel: Kernel, tests: Sequence[str], environment: str) -> str:
    python = arm64.PYTHON if is_foreign(kernel) else test_python()
    pytest = [python, "-m", "pytest", "-q", "-rfE", "--tb=short", "--durations=5"]
    pytest += [*PLUGINS, f"--timeout={TIMEOUT}"]
    pytest += [f"--junitxml={OUT}/junit.xml", "-o", f"junit_suite_name=kernel-{kernel.name}"]
    variables = f"LAB_KERNEL={kernel.name} LAB_OUT={OUT}"
    if _is_listed(tests):
        variables += f" EBPFLB_TEST_LOAD={LOAD} EBPFLB_TEST_SHARED=1"
    else:
        variables += f" EBPFLB_TEST_LOAD={OTHER_LOAD}"
    return f"{variables} {environment} exec {shlex.join([*pytest, *tests])}"


def test_python() -> str:
    """Return the checkout's Python, which has pytest; else the one that runs this."""
    own = Path.cwd() / ".venv/bin/python"
    return str(own) if own.exists() else sys.executable


def _keep(kernel: Kernel, out: Path) -> None:
    """Keep the results of the last run in build/, for CI and for a look by hand."""
    kept = RESULTS / kernel.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for name in ("output", "console", "junit.xml", "verifier.csv"):
        if (out / name).exists():
            shutil.copy(out / name, kept)


def judge(kernel: Kernel, result: machine.Result) -> Outcome:
    """Check that a run ended, reported that, and left results of tests that all passed."""
    took = f"{result.seconds:.0f} s"
    if result.status is None:
        end = machine.last_lines(result.console) or "    (no output)"
        return Outcome(kernel, f"{result.reason}; the console ended with\n{end}", took)
    counts = junit_counts(result.folder / "junit.xml")
    if counts is None:
        end = machine.last_lines(result.output)
        return Outcome(kernel, f"no results, status {result.status}; its output ends:\n{end}", took)
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    error = "" if result.status == 0 and counts["passed"] else f"tests failed ({words})"
    return Outcome(kernel, error, f"{words} in {took}")


def junit_counts(path: Path) -> dict[str, int] | None:
    """Return how many passed, failed and were skipped; None if the file is missing or cut off."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return None
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}
