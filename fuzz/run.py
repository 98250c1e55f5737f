# SPDX-License-Identifier: Apache-2.0
"""Builds all targets, and fuzzes them one after the other: python -m fuzz.run [SECONDS].

SECONDS are for all targets together. What a run has found stays in build/fuzz/corpus, for the next
one. The exit status is 1 if there is a finding; its input is in build/fuzz.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

import atheris

from fuzz.fuzz_python import TARGETS
from fuzz.maps import write

ROOT = Path(__file__).resolve().parents[1]
BUILD, SEEDS = ROOT / "build/fuzz", ROOT / "fuzz/corpus"
FLAGS = "-g1 -O1 -std=gnu11 -fsanitize=fuzzer,address -DDIALECT_NATIVE -DHAVE_SET_RETVAL -Ibpf"
STRICT = "-Wall -Wextra -Werror -Wno-unused-parameter -Wno-pass-failed"
PACKET = "packet"
MOST = {PACKET: 4096}  # bytes of an input; others: 1,024


def build() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    words = ["clang", *FLAGS.split(), *STRICT.split(), "fuzz/packet.c", "-o", str(BUILD / PACKET)]
    subprocess.run(words, cwd=ROOT, check=True)
    write(BUILD / "maps.bin")


def fuzz(target: str, seconds: int) -> bool:
    """Return whether there was no finding. In a child: instrumenting Python takes longer than
    fuzzing.
    """
    found, log = BUILD / "corpus" / target, BUILD / f"{target}.log"
    found.mkdir(parents=True, exist_ok=True)
    limits = [f"-max_total_time={seconds}", f"-max_len={MOST.get(target, 1024)}", "-timeout=20"]
    prefix = f"-artifact_prefix={BUILD}/{target}-"
    words = [target, *limits, "-len_control=0", prefix, str(found), str(SEEDS / target)]
    print(f"{target} ...", flush=True)
    if not (child := os.fork()):
        os.chdir(BUILD)
        with log.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        if target == PACKET:
            os.execv(BUILD / PACKET, words)
        logging.disable()
        atheris.Setup(words, TARGETS[target])
        atheris.Fuzz()
    _, status = os.waitpid(child, 0)
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(lines[-40:] if status else lines[-1:]), flush=True)
    return not status


def main() -> None:
    names = [PACKET, *TARGETS]
    each = max(int(sys.argv[1] if sys.argv[1:] else 60) // len(names), 1)
    build()
    failed = [name for name in names if not fuzz(name, each)]
    if failed:
        sys.exit(f"findings: {', '.join(failed)}; their inputs are in {BUILD}")


if __name__ == "__main__":
    main()
