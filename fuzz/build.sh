#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# OSS-Fuzz's build: each target and its seeds into $OUT. Tried without its base image (README.md).
set -euo pipefail
cd "$SRC/ebpflb"
pip3 install --require-hashes --no-deps --requirement requirements/test.txt
pip3 install --no-deps --no-build-isolation --editable .
# shellcheck disable=SC2086
"$CC" $CFLAGS $LIB_FUZZING_ENGINE -std=gnu11 -DDIALECT_NATIVE -DHAVE_SET_RETVAL -Ibpf fuzz/packet.c \
	-o "$OUT/packet"
python3 -m fuzz.maps "$OUT/maps.bin"
for seeds in fuzz/corpus/*; do
	target=$(basename "$seeds")
	zip --quiet --junk-paths "$OUT/${target}_seed_corpus.zip" "$seeds"/*
	[ "$target" = packet ] || {
		sed "s/sys.argv.pop(1)/\"$target\"/" fuzz/fuzz_python.py > "fuzz/$target.py"
		compile_python_fuzzer "fuzz/$target.py" --add-data bpf:share/ebpflb/bpf
	}
done
