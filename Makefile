# SPDX-License-Identifier: Apache-2.0
# Two commands for a newcomer, each does its own set-up on a fresh Debian 12 machine (as root):
#   make demo    see it at work          make test    pass the tests
# and for those who work on it:
#   make check   lint, types, imports, C          make format    mend what a tool can mend
#   make bench-connect    measure    make test-kernels   on Linux 5.10, 6.1 and 6.12 (vagrant/)
#   make bench-nodeport   the same beside kube-proxy's rules

PYTHON := /usr/bin/python3
VENV := .venv
BIN := $(VENV)/bin
RUN_PACKAGES := python3 python3-venv python3-bpfcc iproute2 util-linux procps
TEST_PACKAGES := $(RUN_PACKAGES) gcc libc6-dev python3-dev clang libbpf-dev bpftool openssl nftables \
	iptables ipset ipvsadm systemd vagrant
BENCH_PACKAGES := $(RUN_PACKAGES) gcc libc6-dev nftables iptables
CLANG := clang -O2 -g -target bpf -Wall -Wextra -Wno-unused-parameter -Werror \
	-Ibpf -I/usr/include/$(shell uname -m)-linux-gnu

GCC := gcc -O2 -Wall -Wextra -Wno-unused-parameter -Werror -Ibpf -DDIALECT_NATIVE

.PHONY: demo test check format bench-connect bench-nodeport lint-c lint-python clean

demo: $(VENV)/run
	$(BIN)/ebpflb demo

test: check
	$(BIN)/pytest

check: lint-python lint-c

lint-python: $(VENV)/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --package vagrant.kernels
	$(BIN)/lint-imports --no-logo

# bpf/ compiles without a warning in its other two dialects: clang with libbpf, and natively.
lint-c: $(VENV)/test
	@mkdir -p build
	$(CLANG) -c bpf/hooks/socket.c -o build/socket.o
	$(CLANG) -DHAVE_SET_RETVAL -c bpf/hooks/socket.c -o build/socket-retval.o
	$(CLANG) -c bpf/hooks/witness.c -o build/witness.o
	$(CLANG) -c bpf/hooks/packet.c -o build/packet.o
	$(CLANG) -DNO_LINK_HEADER -DHAVE_COARSE_CLOCK -c bpf/hooks/packet.c -o build/packet-bare.o
	$(GCC) -c bpf/hooks/socket.c -o build/native.o
	$(GCC) -c bpf/hooks/witness.c -o build/witness-native.o
	$(GCC) -c bpf/hooks/packet.c -o build/packet-native.o

format: $(VENV)/test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-connect: $(VENV)/run
	$(BIN)/python -m bench.connect

bench-nodeport: $(VENV)/run | $(VENV)/packages-bench
	$(BIN)/python -m bench.nodeport

# Set-up is repeated only when setup.cfg changes or a package is missing.
$(VENV)/run: setup.cfg pyproject.toml | $(VENV)/packages-run
	$(BIN)/pip install -qq --disable-pip-version-check --editable .
	@touch $@

$(VENV)/test: setup.cfg pyproject.toml | $(VENV)/packages-test
	$(BIN)/pip install -qq --disable-pip-version-check --editable '.[test]'
	@touch $@ $(VENV)/run

$(VENV)/packages-run:
	@$(call install,$(RUN_PACKAGES))
	@touch $@

$(VENV)/packages-test:
	@$(call install,$(TEST_PACKAGES))
	@touch $@ $(VENV)/packages-run

$(VENV)/packages-bench: | $(VENV)/packages-run
	@$(call install,$(BENCH_PACKAGES))
	@touch $@

# The virtual environment sees Debian's python3-bpfcc, which is not to be had from PyPI.
define install
dpkg --status $(1) >/dev/null 2>&1 || { \
	apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-upgrade \
		--no-install-recommends $(1) >/dev/null; }; \
[ -x $(BIN)/python ] || $(PYTHON) -m venv --system-site-packages $(VENV)
endef

include vagrant/kernels/kernels.mk

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
