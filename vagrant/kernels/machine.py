# SPDX-License-Identifier: Apache-2.0
"""Runs one command inside one kernel: boots it, waits, and returns the results.

The host's root, and so the checkout, is the machine's own, copy-on-write in its memory; only the
output folder is shared for writing. QEMU dies with us however we end (setpriv), a folder that a
killed run left is removed by the next one. QEMU's status does not tell what happened inside: a run
counts only if it left a status.
"""

import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from vagrant.kernels import arm64
from vagrant.kernels.errors import LabError, tool

QEMU, PACKAGE = "qemu-system-x86_64", "qemu-system-x86"
MEMORY = 2048  # MB, three quarters of which may be files
LAST_LINES = 25
# The kernel measures its TSC while it boots: beside other work one ran 3.8 times too fast for good,
# and flows timed out. HPET is right, and takes 0.6 us longer to read; the watchdog would still
# count by the TSC.
APPEND = (
    "quiet panic=-1 mitigations=off nokaslr tsc=reliable clocksource=hpet random.trust_cpu=on"
    " no_timer_check nowatchdog"
)
# Nehalem: with a newer CPU glibc picks instructions that are slow to emulate.
EMULATED = ("-accel", "tcg,thread=single", "-cpu", "Nehalem-v1,+rdrand")
VIRTUAL = ("-accel", "kvm", "-cpu", "host")
COUNTED = ("-icount", "shift=0")  # the machine's clock advances by a nanosecond an instruction
ARM64, ARM64_PACKAGE = "qemu-system-aarch64", "qemu-system-arm"
ARM64_MACHINE = ("-accel", "tcg,thread=multi", "-cpu", "cortex-a72", "-M", "virt")
ARM64_APPEND = "quiet panic=-1 mitigations=off nokaslr nowatchdog"
OUT_OF_QEMU = b"\xba\x01\x05\xb0\x01\xee"  # mov $0x501,%dx; mov $1,%al; out %al,%dx
LEFT = 3  # QEMU's status then: twice what was written, and one
TRIAL_SECONDS = 5.0


_running: set["subprocess.Popen[str]"] = set()


class Result(NamedTuple):
    """A command's result: its status, or None and why there is none; and its folder."""

    status: int | None
    reason: str
    seconds: float
    folder: Path

    @property
    def output(self) -> str:
        return _text(self.folder / "output")

    @property
    def console(self) -> str:
        return _text(self.folder / "console")


@functools.cache
def acceleration() -> tuple[str, ...]:
    """Return KVM if it is faster, by trying it.

    An existing device may refuse, or be emulated itself and a hundred times slower than TCG.
    """
    if not os.access("/dev/kvm", os.W_OK):
        return EMULATED
    return VIRTUAL if _trial(VIRTUAL) < 2 * _trial(EMULATED) else EMULATED


def _trial(accelerator: tuple[str, ...]) -> float:
    """Return the seconds from QEMU's start to a boot sector that ends it (isa-debug-exit)."""
    with tempfile.NamedTemporaryFile(prefix="ebpflb-trial-") as disk:
        disk.write(OUT_OF_QEMU.ljust(510, b"\0") + b"\x55\xaa")
        disk.flush()
        command = [tool(QEMU, PACKAGE), *accelerator, "-M", "pc", "-nodefaults", "-display", "none"]
        command += ["-device", "isa-debug-exit", "-drive", f"format=raw,file={disk.name}"]
        begun = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, check=False, timeout=TRIAL_SECONDS)
            if done.returncode == LEFT:
                return time.monotonic() - begun
    return float("inf")


@contextmanager
def output_folder(runs: Path, name: str) -> Iterator[Path]:
    """Yield a folder for one run, removed afterwards, with those of killed runs."""
    runs.mkdir(parents=True, exist_ok=True)
    for left in runs.iterdir():
        if not Path("/proc", left.name.split("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = runs / f"{os.getpid()}-{name}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(
    image: Path,
    folder: Path,
    command: str,
    *,
    limit: float,
    say: Callable[[str], None],
    counts: bool = False,
) -> Result:
    """Runs a shell command as root inside; ``say`` is called with each line of output. ``counts``:
    times inside are numbers of instructions.
    """
    here = shlex.quote(checkout(image))
    script = f"cd {here} && ( {command}\n) >/run/out/output 2>&1 </dev/null\n"
    script += "echo $? >/run/out/half && mv /run/out/half /run/out/status\n"
    (folder / "command").write_text(script)
    begun = time.monotonic()
    serial = ("-serial", f"file:{folder / 'console'}")
    process = subprocess.Popen(
        [*qemu_command(image, folder, counts=counts), *serial],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _running.add(process)
    try:
        ended = _follow(process, folder / "output", begun + limit, say)
    finally:
        process.kill()
        _running.discard(process)
        complaint = process.communicate()[1].strip()
    reason = "" if ended else f"no end after {limit:g} s"
    return _result(folder, reason or complaint, time.monotonic() - begun)


def shell(image: Path, folder: Path, command: str) -> None:
    """Run an interactive shell on this terminal; Ctrl-A X ends the machine at once."""
    terminal = shlex.quote(os.environ.get("TERM", "linux"))
    columns, rows = shutil.get_terminal_size()
    script = f"cd {shlex.quote(checkout(image))}\nexport TERM={terminal}\n"
    device = f"/dev/{console(image)}"  # /dev/console is nobody's controlling terminal
    script += f"stty rows {rows} columns {columns} <{device}\n"
    script += f"setsid --ctty {command} <{device} >{device} 2>&1\n"
    (folder / "command").write_text(script)
    serial = ("-chardev", "stdio,id=console,mux=on,signal=off", "-serial", "chardev:console")
    subprocess.run([*qemu_command(image, folder), *serial], check=False)


def is_arm64(image: Path) -> bool:
    """Whether the image has a root of its own, with programs for arm64."""
    return (image / "root").exists()


def checkout(image: Path) -> str:
    """Return the checkout's path inside: the same as here, unless the root is another one."""
    return str(arm64.CHECKOUT) if is_arm64(image) else os.getcwd()


def console(image: Path) -> str:
    """Return the serial port inside."""
    return "ttyAMA0" if is_arm64(image) else "ttyS0"


def qemu_command(image: Path, folder: Path, *, counts: bool = False) -> list[str]:
    setpriv = [tool("setpriv", "util-linux"), "--pdeathsig", "KILL", "--"]
    if is_arm64(image):
        machine = [tool(ARM64, ARM64_PACKAGE), *ARM64_MACHINE]
        root, append = (image / "root").resolve(), ARM64_APPEND
    else:
        how = (*EMULATED, *COUNTED) if counts else acceleration()
        machine = [tool(QEMU, PACKAGE), *how, "-M", "pc"]
        root, append = Path("/"), APPEND
    # arm64's two run at the same time: one reads what the other one is writing.
    machine += ["-smp", "2" if is_arm64(image) else "1", "-m", str(MEMORY)]
    machine += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    machine += ["-kernel", str(image / "vmlinux"), "-initrd", str(image / "initramfs")]
    machine += ["-append", f"console={console(image)} {append}"]
    shared = (("root", str(root), ",readonly=on,multidevs=remap"), ("out", str(folder), ""))
    for tag, path, options in shared:
        machine += ["-fsdev", f"local,id={tag},path={path},security_model=none{options}"]
        machine += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return setpriv + machine


def _follow(
    process: "subprocess.Popen[str]", output: Path, until: float, say: Callable[[str], None]
) -> bool:
    """Pass output on until the machine is off; return False if that takes too long."""
    printed, ended = 0, False
    while not ended and time.monotonic() < until:
        ended = process.poll() is not None
        lines = _text(output).splitlines(keepends=True)
        whole = lines if ended or not lines or lines[-1].endswith("\n") else lines[:-1]
        for line in whole[printed:]:
            say(line.rstrip("\n"))
        printed = max(printed, len(whole))
        if not ended:
            time.sleep(0.1)
    return ended


def _result(folder: Path, reason: str, seconds: float) -> Result:
    status = _text(folder / "status").strip()
    if status:
        return Result(int(status), "", seconds, folder)
    lines = _text(folder / "console").splitlines()
    panic = next((line for line in lines if "Kernel panic" in line), "")
    return Result(None, panic or reason or "the machine went off without a result", seconds, folder)


def last_lines(text: str, count: int = LAST_LINES) -> str:
    """Return the end of a console, for a person."""
    return "\n".join(f"    {line}" for line in text.splitlines()[-count:])


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def end_all() -> None:
    """End the machines of all threads; each then cleans up after its own."""
    for process in list(_running):
        process.kill()


def end_on_signals() -> None:
    """Clean up on signals. A shell lets its background processes ignore SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))


def is_root() -> None:
    if os.geteuid() != 0:
        raise LabError("the lab shares this machine's root with the kernels: run it as root")
