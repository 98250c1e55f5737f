# SPDX-License-Identifier: Apache-2.0
"""The kernel lab's commands; run in the checkout, as root:

python3 -m vagrant.kernels list
python3 -m vagrant.kernels fetch [KERNEL ...]
python3 -m vagrant.kernels package KERNEL
python3 -m vagrant.kernels accelerator
python3 -m vagrant.kernels test [KERNEL ...] [-- PYTEST WORDS]
python3 -m vagrant.kernels test-all [KERNEL ...]
python3 -m vagrant.kernels test-arm64
python3 -m vagrant.kernels here KERNEL [PYTEST WORDS]
python3 -m vagrant.kernels run KERNEL COMMAND
python3 -m vagrant.kernels count KERNEL COMMAND
python3 -m vagrant.kernels shell KERNEL
python3 -m vagrant.kernels table
"""

import os
import sys
from collections.abc import Sequence

from vagrant.kernels import archive, lane, lane_tests, listing, machine, verifier
from vagrant.kernels.errors import LabError
from vagrant.kernels.listing import Kernel


def main(words: Sequence[str]) -> int:
    machine.end_on_signals()
    command, *rest = words or ["help"]
    if command not in COMMANDS:
        print(__doc__.strip())
        return 0 if command in ("help", "-h", "--help") else 2
    try:
        return COMMANDS[command](rest)
    except LabError as error:
        print(f"kernel lab: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("kernel lab: interrupted; nothing is left behind", file=sys.stderr)
    return 1


def _list(_words: list[str]) -> int:
    for kernel in (*listing.kernels().values(), listing.ARM64):
        print(*kernel)
    return 0


def _fetch(words: list[str]) -> int:
    for kernel in _named(words):
        print(f"{kernel.name:5} {lane.bootable(kernel)}")
    return 0


def _package(words: list[str]) -> int:
    """Print Debian's package only, for a machine that installs it (vagrant/provision/kernel)."""
    for kernel in _named(words):
        print(archive.fetch(kernel, lane.folder(kernel)))
    return 0


def _accelerator(_words: list[str]) -> int:
    """Print kvm, or qemu if QEMU emulates (vagrant/Vagrantfile)."""
    print("kvm" if machine.acceleration() == machine.VIRTUAL else "qemu")
    return 0


def _test(words: list[str]) -> int:
    """Test all kernels or the named ones; after ``--`` come pytest's words instead of the lane."""
    cut = words.index("--") if "--" in words else len(words)
    outcomes = lane.test_all(_named(words[:cut]), words[cut + 1 :] or lane_tests.TESTS)
    return _report(outcomes)


def _test_all(words: list[str]) -> int:
    """Make two runs, the second even if the first has failed."""
    kernels = _named(words)
    runs = (lane_tests.ALL_TESTS, lane_tests.MORE)
    return max([_report(lane.test_all(kernels, tests)) for tests in runs])


def _test_arm64(_words: list[str]) -> int:
    return _report(lane.test_all([listing.ARM64], lane_tests.ARM64_TESTS))


def _here(words: list[str]) -> int:
    """Run the lane, or other tests, on this machine's kernel (vagrant/provision/kernel)."""
    if not words:
        raise LabError("here wants a kernel")
    return lane.here(listing.named(words[0]), words[1:] or lane_tests.TESTS)


def _report(outcomes: list[lane.Outcome]) -> int:
    print()
    for kernel, error, summary in outcomes:
        print(f"{kernel.name:5} {'ok    ' if not error else 'FAILED'} {summary}")
    for kernel, error, _ in outcomes:
        if error:
            print(f"kernel lab: {kernel.name}: {error}", file=sys.stderr)
    return int(any(error for _, error, _ in outcomes))


def _run(words: list[str], *, counts: bool = False) -> int:
    """Run one command; return its status."""
    if len(words) != 2:
        raise LabError("run and count want a kernel and a command")
    kernel = listing.named(words[0])
    machine.is_root()
    made = lane.bootable(kernel)
    with machine.output_folder(lane.CACHE / "runs", kernel.name) as out:
        result = machine.run(made, out, words[1], limit=lane.LIMIT, say=print, counts=counts)
        if result.status is None:
            raise LabError(f"{result.reason}; the console:\n{machine.last_lines(result.console)}")
        return result.status


def _count(words: list[str]) -> int:
    """Do as run; nanoseconds inside are instructions."""
    return _run(words, counts=True)


def _shell(words: list[str]) -> int:
    if len(words) != 1:
        raise LabError(f"shell wants one kernel of {', '.join(listing.kernels())}")
    kernel = listing.named(words[0])
    machine.is_root()
    made = lane.bootable(kernel)
    with machine.output_folder(lane.CACHE / "runs", kernel.name) as out:
        print(f"{kernel.name}: the host's files, copy-on-write; `exit` or Ctrl-A X ends it")
        machine.shell(made, out, "/bin/bash")
    return 0


def _table(words: list[str]) -> int:
    """Measure both BCCs' programs and write verifier.csv; print this machine's numbers too.

    The other distribution's BCC has compiled before (vagrant/bcc).
    """
    kernels = _named(words)
    os.environ["LAB_RENEW"] = "1"
    measured: dict[str, verifier.Counts] = {
        column: {} for column in (verifier.STACK, *(kernel.name for kernel in kernels))
    }
    for bytecode in (lane.BYTECODE, lane.OTHER_BYTECODE):
        if _report(lane.test_all(kernels, [lane_tests.BUDGET], "LAB_RENEW=1", bytecode)):
            return 1
        measured[verifier.STACK] |= verifier.stacks(bytecode)
        for kernel in kernels:
            written = verifier.read(lane.RESULTS / kernel.name / "verifier.csv")
            measured[kernel.name] |= verifier.counts_of(written, kernel.name)
    columns = [verifier.STACK, *listing.kernels()]
    verifier.write(verifier.renewed(verifier.read(), measured), columns)
    print(f"{verifier.TABLE.name} is renewed; of this machine's kernel it has nothing:")
    lane.show_here()
    return 0


def _named(words: list[str]) -> list[Kernel]:
    return [listing.named(name) for name in words] or list(listing.kernels().values())


COMMANDS = {
    "list": _list,
    "fetch": _fetch,
    "package": _package,
    "accelerator": _accelerator,
    "test": _test,
    "test-all": _test_all,
    "test-arm64": _test_arm64,
    "here": _here,
    "run": _run,
    "count": _count,
    "shell": _shell,
    "table": _table,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
