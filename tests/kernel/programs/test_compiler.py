# SPDX-License-Identifier: Apache-2.0
"""A child process compiles bpf/ to bytecode, only once for the same sources."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ebpflb.errors import CompileError
from ebpflb.kernel.maps import layout
from ebpflb.kernel.programs import compiler
from ebpflb.kernel.programs.compiler import Compiled, compile_source
from ebpflb.kernel.programs.loader import SECTIONS
from tests.kernel.variants import SMALL_SOURCE, SOURCE, VARIANTS, needs_root

pytestmark = pytest.mark.usefixtures("nothing_brought")

PACKAGE = Path(compiler.__file__).parents[2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of bpf/ that a test may change."""
    return Path(shutil.copytree(layout.SOURCES, tmp_path / "bpf"))


def error_places(text: str) -> list[str]:
    """Return the places where clang reports errors, as path:line."""
    found = re.findall(r"(?m)^(\S+):(\d+):\d+: (?:fatal )?error:", text)
    return [f"{os.path.normpath(path)}:{line}" for path, line in found]


def replace(path: Path, old: str, new: str) -> int:
    """Change a line of a file; return its number."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def test_each_program_becomes_bytecode(compiled: Compiled) -> None:
    """Each PROGRAM line becomes bytecode, in whole instructions, for a section that exists."""
    text = (layout.SOURCES / SOURCE).read_text()
    assert text.count("\nPROGRAM(") == len(compiled.programs) == len(SECTIONS)
    assert set(compiled.sections) == set(compiled.programs)
    assert set(compiled.sections.values()) == set(SECTIONS)
    assert all(code and len(code) % 8 == 0 for code in compiled.programs.values())


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("rules/frontend.h", "enum found found = ABSENT;", "enum found found = nil;", "'nil'"),
        ("hooks/socket.c", "hooks at the sockets", "hooks */ nonsense /*", "'nonsense'"),
        (
            "layout/service.h",
            "SIZE(struct range, 8);",
            "SIZE(struct range, 9);",
            "size of struct range",
        ),
    ],
)
def test_a_mistake_has_its_file_and_line(
    sources: Path, tmp_path: Path, file: str, old: str, new: str, complaint: str
) -> None:
    """A mistake is shown as the compiler reports it, with its file and line."""
    line = replace(sources / file, old, new)
    with pytest.raises(CompileError) as refusal:
        compile_source(SOURCE, cache=tmp_path / "cache", sources=sources)
    text = str(refusal.value)
    assert text.startswith(f"{SOURCE} does not compile:\n")
    assert f"{sources / file}:{line}" in error_places(text)
    assert complaint in text
    assert "Traceback" not in text
    assert not (tmp_path / "cache").exists()


def test_no_such_source(tmp_path: Path) -> None:
    """A missing hook file is named, and not cached."""
    with pytest.raises(CompileError, match=r"hooks/missing\.c does not compile: .*No such file"):
        compile_source("hooks/missing.c", cache=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every child fail from now on."""
    monkeypatch.setattr(sys, "executable", "/bin/false")


@pytest.mark.usefixtures("one_variant", "no_child")
class TestNotCached:
    """Changes that need a new compilation: the child fails, which shows that it was started."""

    @staticmethod
    def is_compiled(cache: Path, sources: Path = layout.SOURCES, *more: str) -> bool:
        flags = (*VARIANTS["set_retval"], *more)
        try:
            return not compile_source(SOURCE, flags, cache=cache, sources=sources).cached
        except CompileError:
            return True

    def test_same_text_elsewhere(self, cache: Path, sources: Path) -> None:
        """The folder of the sources does not matter."""
        assert not self.is_compiled(cache, sources)

    def test_other_flags_change_the_key(self, cache: Path) -> None:
        assert self.is_compiled(cache, layout.SOURCES, "-DMORE")

    @pytest.mark.parametrize(
        "file", [SOURCE, "layout.h", "layout/flow.h", "core/counters.h", "stub/include/asm/page.h"]
    )
    def test_a_changed_source_changes_the_key(self, cache: Path, sources: Path, file: str) -> None:
        """A changed character in any file, stub headers included, changes the key."""
        (sources / file).write_text((sources / file).read_text() + "\n")
        assert self.is_compiled(cache, sources)

    def test_new_file(self, cache: Path, sources: Path) -> None:
        """Another file, which an include may find first, changes the key."""
        (sources / "path" / "types.h").touch()
        assert self.is_compiled(cache, sources)

    def test_bcc_version(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another version of BCC changes the key."""
        (tmp_path / "bcc").mkdir()
        (tmp_path / "bcc" / "__init__.py").touch()
        (tmp_path / "bcc" / "version.py").write_text("__version__ = '99.0'\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert compiler.bcc_version() == "99.0"
        assert self.is_compiled(cache)


def test_cache_cannot_be_written(tmp_path: Path) -> None:
    """Without a cache the programs are still compiled."""
    (tmp_path / "file").touch()
    found = compile_source(SMALL_SOURCE, cache=tmp_path / "file" / "cache")
    assert found.programs == compile_source(SMALL_SOURCE, cache=tmp_path / "cache").programs


AGENT = """
import sys
from pathlib import Path
from ebpflb.kernel.maps import layout
from ebpflb.kernel.programs import compiler
found = compiler.compile_source("hooks/netns_cookie.c", cache=Path(sys.argv[1]))
assert not found.cached and found.programs
assert "bcc" not in sys.modules, "bcc is in the agent"
print(layout.SOURCES)
"""


@needs_root
def test_private_checkout(tmp_path: Path) -> None:
    """The user nobody compiles sources that only root can read; the agent imports no bcc."""
    checkout = tmp_path / "checkout"
    shutil.copytree(PACKAGE, checkout / "ebpflb")
    shutil.copytree(layout.SOURCES, checkout / "bpf")
    checkout.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", AGENT, tmp_path / "cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
        umask=0o077,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(checkout / "bpf")


@needs_root
def test_nobody_compiles(sources: Path, tmp_path: Path) -> None:
    """The compiler reads only what every user may read: root's private header is not found."""
    (tmp_path / "secret.h").touch()
    tmp_path.chmod(0o700)
    replace(sources / SOURCE, "LICENSE", f'#include "{tmp_path}/secret.h"\nLICENSE')
    with pytest.raises(CompileError, match=r"secret\.h' file not found|Permission denied"):
        compile_source(SOURCE, cache=tmp_path / "cache", sources=sources)


# Bytecode is loaded from the cache only if it is whole, and only root or this user wrote it.

PROGRAMS = {"connect4": bytes(16), "connect6": bytes(range(8))}


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    path = tmp_path / "cache" / f"{'a' * 64}{compiler.SUFFIX}"
    compiler.write_cached(path, PROGRAMS)
    return path


def test_what_was_written_is_read(entry: Path) -> None:
    """Every user with read rights gets the bytecode, and no trace of how it was written."""
    assert compiler.read_cached(entry) == PROGRAMS
    assert os.listdir(entry.parent) == [entry.name]
    assert entry.stat().st_mode & 0o777 == 0o644


def flip(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-1] ^= 1
    entry.write_bytes(content)


def packed_by_others(entry: Path) -> None:
    entry.write_bytes(msgspec.msgpack.encode(PROGRAMS))


def renamed(entry: Path) -> None:
    other = entry.with_name("b" * 64 + compiler.SUFFIX)
    compiler.write_cached(other, {"connect4": bytes(8)})
    other.replace(entry)


def linked(entry: Path) -> None:
    entry.rename(elsewhere := entry.with_name("elsewhere"))
    entry.symlink_to(elsewhere)


def a_pipe(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


WRONG: dict[str, Callable[[Path], object]] = {
    "cut short": lambda entry: entry.write_bytes(entry.read_bytes()[:-8]),
    "longer": lambda entry: entry.write_bytes(entry.read_bytes() + bytes(8)),
    "empty": lambda entry: entry.write_bytes(b""),
    "another bit": flip,
    "without a digest": packed_by_others,
    "of another key": renamed,
    "a link": linked,
    "a pipe": a_pipe,
    "writable by all": lambda entry: entry.chmod(0o666),
    "writable by the group": lambda entry: entry.chmod(0o664),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_what_is_not_whole_and_ours_is_no_entry(
    entry: Path, spoil: Callable[[Path], object]
) -> None:
    """An incomplete or foreign entry is treated as missing, and a new one replaces it."""
    spoil(entry)
    assert compiler.read_cached(entry) is None
    compiler.write_cached(entry, PROGRAMS)
    assert compiler.read_cached(entry) == PROGRAMS
