# SPDX-License-Identifier: Apache-2.0
"""The variants of the programs for recording and monitoring cost the usual programs nothing."""

import re
import shutil
from itertools import chain
from pathlib import Path

import pytest

from ebpflb.kernel.maps import layout
from ebpflb.kernel.programs import compiler, precompile
from tests.kit import once


def without_records(text: str) -> str:
    """Return the source without the macros that note steps."""
    return re.sub(r"\brecord(_at)?\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\);", ";", text)


def without_events(text: str) -> str:
    """Return the source without events: only the last argument of each event macro is left."""
    text = re.sub(r"\n\tmonitor_(packet_)?begin\([\w, ]+\);", "", text)
    text = text.replace("monitor_time()", "0")
    while found := re.search(r"\bmonitor_\w+\(", text):
        depth, last, at = 1, found.end(), found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            last = at + 1 if text[at] == "," and depth == 1 else last
            at += 1
        text = f"{text[: found.start()]}({text[last : at - 1]}){text[at:]}"
    return text


@pytest.fixture(scope="module")
def bare_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return bpf/ without any of these macros."""
    copy = Path(shutil.copytree(layout.SOURCES, tmp_path_factory.mktemp("bare") / "bpf"))
    folders = ("core", "rules", "sockets", "path", "engine/*", "hooks")
    for path in chain.from_iterable(copy.glob(f"{folder}/*.[ch]") for folder in folders):
        text = without_events(without_records(path.read_text()))
        assert not re.search(r"\b(record|record_at)\(", text), path
        path.write_text(text)
    for name in ("record", "event", "event_call", "event_packet"):
        (copy / f"record/{name}.h").write_text("")
    return copy


@pytest.mark.extended
@pytest.mark.parametrize(
    ("source", "flags"),
    [
        ("hooks/packet.c", precompile.VARIANTS["hooks/packet.c"]["coarse clock"]),
        ("hooks/socket.c", (precompile.RETVAL,)),
    ],
    ids=["packets", "sockets"],
)
def test_programs_that_record_nothing_pay_nothing(
    bare_sources: Path, shared: Path, cache: Path, source: str, flags: tuple[str, ...]
) -> None:
    """The instructions of usual programs equal those of sources without recording macros."""
    with once.alone(shared):
        usual = compiler.compile_source(source, flags, cache=cache, here=True)
    bare = compiler.compile_source(
        source, flags, cache=bare_sources, sources=bare_sources, here=True
    )
    assert usual.programs == bare.programs


def test_every_step_has_its_words() -> None:
    """Each kind of step has a row in `ebpflb explain`, or is known to add none; and no row is for a
    kind that no program notes.
    """
    from ebpflb.tools.explain import ways

    kinds = layout.names("step_kind", "STEP_").values()
    said = {key.partition("=")[0] for key in ways.SENTENCES} - {"affinity_none"}
    assert sorted([*said, *ways.WITHOUT_ROW]) == sorted(kinds)
    for name, prefix in (("masquerade_reason", "MASQUERADE_"), ("step_source", "STEP_")):
        kind = {"masquerade_reason": "snat", "step_source": "source"}[name]
        values = {key.partition("=")[2] for key in ways.SENTENCES if key.startswith(f"{kind}=")}
        assert values == {*layout.names(name, prefix).values()} - {"none"}
