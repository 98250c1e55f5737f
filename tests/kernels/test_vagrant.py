# SPDX-License-Identifier: Apache-2.0
"""The machines of Vagrant, as far as they can be tried without starting one."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from vagrant.kernels import __main__ as commands
from vagrant.kernels import lane, lane_tests, listing, machine

VAGRANT = Path(listing.__file__).parents[1]
SCRIPTS = sorted(
    [*VAGRANT.glob("provision/*"), *(VAGRANT / name for name in ("bcc", "box", "in-namespace"))]
)
# What of Vagrant's configuration the Vagrantfile says about libvirt, without Vagrant.
LIBVIRT = """
class Recorder < BasicObject
  def method_missing(name, *words, &block)
    case name
    when :provider then block.call(::Libvirt.new) if words.first == "libvirt"
    else block&.call(self) unless name == :define
    end
    self
  end
end
class Libvirt
  def method_missing(name, *words) = puts([name, *words].join(" "))
end
module Vagrant
  def self.configure(_version) = yield(Recorder.new)
end
load ARGV.first
"""


@pytest.mark.extended
@pytest.mark.skipif(not shutil.which("vagrant"), reason="needs Debian's package vagrant")
def test_vagrantfile(tmp_path: Path) -> None:
    """Vagrant finds no fault with it: a machine for each kernel, and two nodes of a cluster."""
    own = {"VAGRANT_HOME": str(tmp_path / "home"), "VAGRANT_DOTFILE_PATH": str(tmp_path / "dot")}
    done = subprocess.run(
        ["vagrant", "validate", "--ignore-provider"],
        cwd=VAGRANT,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Vagrantfile validated successfully" in done.stdout
    machines = [f"kernel-{name}" for name in listing.kernels()] + ["control", "worker"]
    assert all(f"{machine}:" in done.stdout for machine in machines)


@pytest.mark.skipif(not shutil.which("ruby"), reason="needs Debian's package vagrant")
@pytest.mark.parametrize("found", ["kvm", "qemu", ""])
def test_emulated(found: str, tmp_path: Path) -> None:
    """Plain QEMU is asked for where the probe finds no KVM, and only there."""
    probe = tmp_path / "python3"
    probe.write_text(f"#!/bin/sh\n[ \"$*\" = '-m vagrant.kernels accelerator' ] && echo {found}\n")
    probe.chmod(0o755)
    done = subprocess.run(
        ["ruby", "-e", LIBVIRT, str(VAGRANT / "Vagrantfile")],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    settings = done.stdout.splitlines()
    assert "memory= 2048" in settings
    assert ("driver= qemu" in settings) == (found == "qemu")


@pytest.mark.parametrize(
    ("acceleration", "said"), [(machine.VIRTUAL, "kvm"), (machine.EMULATED, "qemu")]
)
def test_accelerator(
    acceleration: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The Vagrantfile is told what the lab's own machines use."""
    monkeypatch.setattr(machine, "acceleration", lambda: acceleration)
    assert commands.main(["accelerator"]) == 0
    assert capsys.readouterr().out == f"{said}\n"


@pytest.mark.parametrize("brought", [True, False])
def test_here(brought: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a machine of Vagrant's the same tests run, with bytecode that came along or is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EBPFLB_TEST_LOAD", raising=False)
    monkeypatch.setattr(lane, "OUT", str(tmp_path / "out"))
    monkeypatch.setattr(machine, "is_root", lambda: None)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$LAB_KERNEL $EBPFLB_TEST_LOAD $*" >>ran\n')
    python.chmod(0o755)
    monkeypatch.setattr(lane, "test_python", lambda: str(python))
    if brought:
        (tmp_path / "bytecode").mkdir()
    assert commands.main(["here", "5.10"]) == 0
    *before, tests = (tmp_path / "ran").read_text().splitlines()
    assert before == ([] if brought else ["  -m ebpflb.kernel.programs.precompile"])
    assert tests.startswith(f"5.10 {lane.LOAD} -m pytest ")
    assert tests.endswith(" ".join(lane_tests.TESTS))


def test_tests_of_the_lane_exist() -> None:
    """And none is in both lists, that of the whole lane and that of what passes too."""
    usual, more = (
        [word for word in words if not word.startswith("--")]
        for words in (lane_tests.ALL_TESTS, lane_tests.MORE)
    )
    assert [it for it in (*usual, *more) if not (VAGRANT.parent / it).exists()] == []
    assert not set(usual) & set(more)


INSIDE = """
ip -brief link
virsh --connect qemu:///system version >/dev/null && echo libvirt
ps -e --no-headers | wc -l
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.skipif(
    not all(map(shutil.which, ("libvirtd", "virtlogd", "vagrant", "slirp4netns", "dnsmasq"))),
    reason="needs Debian's vagrant-libvirt, libvirt-daemon-system and slirp4netns",
)
def test_in_namespace(tmp_path: Path) -> None:
    """libvirt runs, with a network device that this machine does not have, and nothing is left."""
    done = subprocess.run(
        [VAGRANT / "in-namespace", "sh", "-c", INSIDE],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    devices, libvirt, processes = done.stdout.partition("libvirt\n")
    assert libvirt
    assert {line.split()[0] for line in devices.splitlines()} == {"lo", "tap0"}
    assert int(processes) < 20
    assert "tap0" not in os.listdir("/sys/class/net")
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in _command_lines()


def test_in_namespace_lacks(tmp_path: Path) -> None:
    """Whoever lacks a program is told the packages in one line."""
    for name in ("bash", "env", "realpath", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "id").write_text("#!/bin/sh\necho 0\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        [VAGRANT / "in-namespace"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("in-namespace: libvirtd is missing: apt install libvirt-daemon")


def _command_lines() -> str:
    lines = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines.append(process.read_text())
    return "\n".join(lines)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script(script: Path) -> None:
    """Every script of the lab can be run, and bash can read it."""
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[1] == "# SPDX-License-Identifier: Apache-2.0"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert not done.stderr
