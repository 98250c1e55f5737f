# SPDX-License-Identifier: Apache-2.0
# On Debian 12, as root; each target installs what it needs:
#   make demo            shows it at work on this machine
#   make test            check, then all tests
#   make test-fast       the quick ones of the tests that need no root, with fewer examples
#   make check           lint, types, import rules; compiles the C with clang and gcc
#   make format          fixes what ruff can fix
#   make test-kernels    the tests that need a kernel, on Linux 5.10, 6.1 and 6.12 (vagrant/README.md)
#   make bench-connect   measures calls on sockets and the agent (docs/benchmarks.md)
#   make bench-nodeport  measures NodePorts beside kube-proxy's rules
#   make diagrams        draws the diagrams of docs/ from their sources

PYTHON := /usr/bin/python3
VENV := .venv
BIN := $(VENV)/bin
RUN_PACKAGES := python3 python3-venv python3-bpfcc iproute2 util-linux procps
TEST_PACKAGES := $(RUN_PACKAGES) gcc libc6-dev python3-dev clang libbpf-dev bpftool openssl nftables \
	graphviz iptables ipset ipvsadm systemd vagrant
BENCH_PACKAGES := $(RUN_PACKAGES) gcc libc6-dev nftables iptables
CLANG := clang -O2 -g -target bpf -Wall -Wextra -Wno-unused-parameter -Werror \
	-Ibpf -I/usr/include/$(shell uname -m)-linux-gnu

GCC := gcc -O2 -Wall -Wextra -Wno-unused-parameter -Werror -Ibpf -DDIALECT_NATIVE

# Otherwise every worker and every agent that a test starts would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Tests wait more than they compute: three at a time for each processor.
WORKERS := $(shell echo $$((3 * $$(nproc))))

.PHONY: demo test test-fast check format diagrams bench-connect bench-nodeport lint-c lint-python clean

demo: $(VENV)/run
	$(BIN)/ebpflb demo

test: check
	$(BIN)/pytest -n $(WORKERS)

test-fast: $(VENV)/test
	EBPFLB_TEST_LOAD=0.1 $(BIN)/pytest -n $$(($$(nproc) + 1)) -m "pure and not slow"

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
	$(CLANG) -c bpf/hooks/netns_cookie.c -o build/netns-cookie.o
	$(CLANG) -c bpf/hooks/packet.c -o build/packet.o
	$(CLANG) -DNO_LINK_HEADER -DHAVE_COARSE_CLOCK -c bpf/hooks/packet.c -o build/packet-bare.o
	$(CLANG) -DHAVE_CONNTRACK -c bpf/hooks/packet.c -o build/packet-conntrack.o
	$(CLANG) -c bpf/hooks/conntrack_probe.c -o build/conntrack-probe.o
	$(GCC) -c bpf/hooks/socket.c -o build/native.o
	$(GCC) -c bpf/hooks/netns_cookie.c -o build/netns-cookie-native.o
	$(GCC) -c bpf/hooks/packet.c -o build/packet-native.o
	$(GCC) -DHAVE_CONNTRACK -c bpf/hooks/packet.c -o build/packet-conntrack-native.o
	$(GCC) -c bpf/hooks/conntrack_probe.c -o build/conntrack-probe-native.o

format: $(VENV)/test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The diagrams of docs/, from their sources; dot is Debian's graphviz.
diagrams: $(VENV)/test docs/diagrams/two-ways.svg

docs/diagrams/%.svg: docs/diagrams/%.dot
	dot -Tsvg $< -o $@

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

# The virtual environment sees Debian's python3-bpfcc, which PyPI does not have.
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
