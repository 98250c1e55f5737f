# SPDX-License-Identifier: Apache-2.0
# On Debian 12 or 13, as root; each target installs what it needs (13: docs/support.md):
#   make help            prints these lines
#   make demo            shows it at work on this machine
#   make test            check, and a part of all tests: what every change must pass
#   make test-all        check, and all tests
#   make test-fast       the quick ones of the tests that need no root, with fewer examples
#   make soak            new simulated schedules, and real traffic with churn and kills: FOR=10m SEED=1
#   make fuzz            coverage-guided fuzzing of parsers and packets (fuzz/README.md): FOR=60 seconds
#   make check           lint, types, import rules; compiles the C with clang and gcc
#   make format          fixes what ruff can fix
#   make test-kernels    what every change must pass on Linux 5.10, 6.1 and 6.12 (vagrant/README.md)
#   make test-bcc        compiles and loads bpf/ with the other distribution's BCC
#   make bench           measures everything, and renews the figures of docs/benchmarks.md;
#                        BENCH="--only connect,growth --quick": some of it, with few rounds
#   make bench-connect, bench-agent, bench-nodeport, bench-growth, bench-schedulers, bench-draws
#                        one part of it, which prints its figures; BENCH="--rounds 20": its options
#   make image           builds the wheel with bytecode, then the container's image from it, with
#                        docker, podman or buildah
#   make release         makes everything that a release publishes in dist/ (docs/contributing.md)
#   make release-twice   the same twice, and compares the bytes
#   make diagrams        draws the diagrams of docs/ from their sources
#   make conformance     plays the table of docs/conformance.md against TARGET
#   make test-page       tests the page, also in Chromium
#   make screenshots     takes those of docs/ui.md, from the real page
#   make lock            writes requirements/ anew after a change of setup.cfg; make renew: newer ones

PYTHON := /usr/bin/python3
VENV := .venv
BIN := $(VENV)/bin
RUN_PACKAGES := python3 python3-venv python3-bpfcc iproute2 util-linux procps conntrack
# What the kernel lab's tests need, and so its machines (vagrant/README.md).
LANE_PACKAGES := $(RUN_PACKAGES) gcc libc6-dev python3-dev bpftool openssl nftables iptables ipset ipvsadm
TEST_PACKAGES := $(LANE_PACKAGES) clang libbpf-dev graphviz systemd vagrant chromium \
	chromium-driver man-db python3-matplotlib python3-seccomp
RELEASE_PACKAGES := buildah crun dpkg-dev netavark openssh-client qemu-user-static \
	rpm xz-utils
BENCH_PACKAGES := $(RUN_PACKAGES) gcc libc6-dev nftables iptables python3-matplotlib
CLANG := clang -O2 -target bpf -Wall -Wextra -Wno-unused-parameter -Werror \
	-Ibpf -I/usr/include/$(shell uname -m)-linux-gnu

GCC := gcc -O1 -Wall -Wextra -Wno-unused-parameter -Werror -Ibpf -DDIALECT_NATIVE

# What setup.cfg and pyproject.toml ask for, as versions with hashes (docs/contributing.md).
PIP_INSTALL := $(BIN)/pip install -qq --disable-pip-version-check
BUILD_REQUIRES := $(PYTHON) -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")'
LOCK = build/uv/bin/uv pip compile --quiet $(UPGRADE) --generate-hashes --universal \
	--python-version 3.11 --custom-compile-command "make lock" \
	--override requirements/left-out.txt --output-file

# Otherwise every worker and every agent that a test starts would compile its modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Tests wait more than they compute: three at a time for each processor.
WORKERS := $(shell echo $$((3 * $$(nproc))))

.PHONY: help demo test test-all test-fast test-page conformance soak fuzz check format diagrams screenshots bench bench-connect \
	bench-agent bench-schedulers bench-draws bench-nodeport bench-growth lint-c lint-python \
	lint-types run-test run-test-all tests-libraries image wheel release release-twice \
	lock renew lane-packages clean

demo: $(VENV)/run
	$(BIN)/ebpflb demo

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

# `make test`: each test with one or two sets of its parameters, each file of tests/network with one
# of its set-ups, what is repeated a fifth as often, and without those that take long.
PYTEST := $(BIN)/python -m pytest
SETS := --parameter-sets=2 --one-set-up=tests/network \
	$(patsubst %,--parameter-sets=1:tests/%,agent cli kernel deploy network packet simulation)
PART := -p vagrant.kernels.parameter_sets $(SETS) -m "not extended"

# What check computes has room where the tests wait.
test test-all: $(VENV)/test
	$(MAKE) --jobs=$$(nproc) run-$@ check

run-test: SELECTED := $(PART)
run-test: export EBPFLB_TEST_LOAD := 0.2
run-test run-test-all: tests-libraries build/tests-bytecode
	$(RUN_SELECTED)

# What fails beside others runs again alone, and fails the whole if it fails there. One that passes
# there is named above all the same: it has a race, or what it tests has one.
define RUN_SELECTED
$(PYTEST) -n $(WORKERS) $(SELECTED) || \
	{ [ $$? = 1 ] && echo "Those that failed, alone:" && $(PYTEST) $(SELECTED) --last-failed; }
endef

# Otherwise every worker would rewrite the assertions of all new files. Its errors the tests say.
build/tests-bytecode: $(shell find tests -name '*.py') $(VENV)/test
	@mkdir -p build
	-$(PYTEST) $(SELECTED) --collect-only --quiet --quiet >/dev/null
	@touch $@

# Otherwise workers would wait for them.
tests-libraries: $(VENV)/test
	-$(BIN)/python -m tests.simulation.build
	-$(BIN)/python -m tests.native.build

test-fast: $(VENV)/test
	EBPFLB_TEST_LOAD=0.1 $(BIN)/pytest -n $$(($$(nproc) + 1)) -m "pure and not slow"

# TARGET: ebpflb-netfilter, ebpflb-flows, kube-proxy-nftables, kube-proxy-iptables (KUBE_PROXY: its
# binary), or the command of another proxy (docs/conformance.md).
conformance: $(VENV)/test
	$(BIN)/python -m tests.conformance "$${TARGET:-ebpflb-netfilter}"

# Until Ctrl-C, or FOR=10m; SEED: the first seed; HISTORY: the file of every request and fault.
soak: $(VENV)/test
	$(BIN)/python -m tests.soak $(if $(FOR),--for $(FOR)) $(if $(SEED),--seed $(SEED)) \
		$(if $(HISTORY),--history $(HISTORY))

fuzz: $(VENV)/fuzz
	$(BIN)/python -m fuzz.run $(or $(FOR),60)

check: lint-python lint-c lint-types

lint-python: $(VENV)/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

lint-types: $(VENV)/test
	$(BIN)/mypy

# bpf/ compiles without a warning in its other two dialects: clang with libbpf, and natively. Of
# packet.c and socket.c one variant goes through all of clang: of the others, and of explain.c, which
# includes both, it knows its warnings before it generates code. gcc knows them with few optimizations.
VARIANT := $(CLANG) -fsyntax-only
define LINTED
$(CLANG) -c bpf/hooks/socket.c -o build/socket.o
$(VARIANT) -DHAVE_SET_RETVAL bpf/hooks/socket.c
$(VARIANT) -DMONITOR -DHAVE_PROCESS bpf/hooks/socket.c
$(CLANG) -c bpf/hooks/netns_cookie.c -o build/netns-cookie.o
$(CLANG) -c bpf/hooks/packet.c -o build/packet.o
$(VARIANT) -DNO_LINK_HEADER -DHAVE_COARSE_CLOCK bpf/hooks/packet.c
$(VARIANT) -DRECORD bpf/hooks/packet.c
$(VARIANT) -DMONITOR bpf/hooks/packet.c
$(CLANG) -c bpf/hooks/connection_end.c -o build/connection-end.o
$(VARIANT) -DHAVE_SET_RETVAL bpf/hooks/explain.c
$(CLANG) -c bpf/hooks/flow_end.c -o build/flow-end.o
$(CLANG) -c bpf/hooks/socket_end.c -o build/socket-end.o
$(CLANG) -c bpf/hooks/socket_opening.c -o build/socket-opening.o
$(CLANG) -c bpf/hooks/answer.c -o build/answer.o
$(CLANG) -c bpf/hooks/hand_over.c -o build/hand-over.o
$(VARIANT) -DMONITOR bpf/hooks/hand_over.c
$(CLANG) -c bpf/hooks/quiet_socket.c -o build/quiet-socket.o
$(GCC) -c bpf/hooks/socket.c -o build/native.o
$(GCC) -c bpf/hooks/netns_cookie.c -o build/netns-cookie-native.o
$(GCC) -c bpf/hooks/packet.c -o build/packet-native.o
$(GCC) -DRECORD -c bpf/hooks/packet.c -o build/packet-record-native.o
$(GCC) -c bpf/hooks/explain.c -o build/explain-native.o
$(GCC) -c bpf/hooks/flow_end.c -o build/flow-end-native.o
$(GCC) -c bpf/hooks/socket_end.c -o build/socket-end-native.o
$(GCC) -c bpf/hooks/socket_opening.c -o build/socket-opening-native.o
$(GCC) -c bpf/hooks/answer.c -o build/answer-native.o
$(GCC) -c bpf/hooks/hand_over.c -o build/hand-over-native.o
$(GCC) -c bpf/hooks/quiet_socket.c -o build/quiet-socket-native.o
$(GCC) -c bpf/hooks/connection_end.c -o build/connection-end-native.o
endef
export LINTED

# Compiled again only when a source, the packages or these commands change.
lint-c: build/linted

build/linted: $(shell find bpf -name '*.[ch]') Makefile $(VENV)/test
	@mkdir -p build
	@echo "$$LINTED" | xargs -P $$(nproc) -I{} sh -c 'echo {} && {}'
	@touch $@

format: $(VENV)/test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# ARCH=arm64: for such machines; BASE=NAME: another base image; PIP_INDEX_URL=URL, PIP_CERT=FILE: for a
# proxy; TARGET=compiler: with BCC.
IMAGE_OPTIONS = ARCH='$(ARCH)' BASE='$(BASE)' ENGINE='$(ENGINE)'

image: wheel
	$(IMAGE_OPTIONS) deploy/image/build $(TARGET)

# With the bytecode of every variant, which BCC compiles here.
wheel: $(VENV)/test
	rm -rf bytecode dist/*.whl
	$(BIN)/python -m ebpflb.kernel.programs.precompile bytecode
	$(BIN)/python -m build --no-isolation --wheel --outdir dist .
	rm -rf bytecode

release: $(VENV)/test | $(VENV)/packages-release
	$(IMAGE_OPTIONS) KEY='$(KEY)' SOURCE_URL='$(SOURCE_URL)' deploy/release/make

release-twice: release
	rm -rf build/first
	mv dist build/first
	$(MAKE) release
	diff --recursive build/first dist && echo "both builds are equal"

# The diagrams of docs/, from their sources; dot is Debian's graphviz.
diagrams: $(VENV)/test docs/diagrams/two-ways.svg

docs/diagrams/%.svg: docs/diagrams/%.dot
	dot -Tsvg $< -o $@

test-page: $(VENV)/test
	$(PYTEST) tests/page

screenshots: $(VENV)/test
	$(BIN)/python -m tests.page.screenshots docs/images

bench: $(VENV)/run | $(VENV)/packages-bench
	$(BIN)/python -m bench $(BENCH)

bench-growth: $(VENV)/run
	$(BIN)/python -m bench.growth $(BENCH)

bench-connect: $(VENV)/run
	$(BIN)/python -m bench.connect $(BENCH)

bench-agent: $(VENV)/run
	$(BIN)/python -m bench.agent_load $(BENCH)

bench-schedulers: $(VENV)/run
	$(BIN)/python -m bench.schedulers $(BENCH)

bench-draws: $(VENV)/run
	$(BIN)/python -m bench.draws $(BENCH)

bench-nodeport: $(VENV)/run | $(VENV)/packages-bench
	$(BIN)/python -m bench.nodeport $(BENCH)

# Set-up is repeated only when these files change or a package is missing.
$(VENV)/run: requirements/run.txt setup.cfg pyproject.toml setup.py | $(VENV)/packages-run
	$(call set_up,run)
	@touch $@

$(VENV)/test: requirements/test.txt setup.cfg pyproject.toml setup.py | $(VENV)/packages-test
	$(call set_up,test)
	@touch $@ $(VENV)/run

$(VENV)/lane: requirements/test.txt setup.cfg pyproject.toml setup.py | $(VENV)/packages-lane
	$(call set_up,test)
	@touch $@ $(VENV)/run

$(VENV)/fuzz: requirements/fuzz.txt $(VENV)/test | $(VENV)/packages-fuzz
	$(call set_up,fuzz)
	@touch $@

# Wheels only: a source archive would be built with whatever is newest. setuptools is in the lock.
# Nothing that the lock does not name: what requirements/left-out.txt takes out stays out.
define set_up
$(PIP_INSTALL) --no-deps --require-hashes --only-binary :all: --requirement requirements/$(1).txt
$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
endef

lock: build/uv/bin/uv
	$(BUILD_REQUIRES) | $(LOCK) requirements/run.txt setup.cfg -
	$(BUILD_REQUIRES) | $(LOCK) requirements/ui.txt --constraint requirements/run.txt \
		--extra ui setup.cfg -
	$(BUILD_REQUIRES) | $(LOCK) requirements/test.txt --constraint requirements/ui.txt \
		--extra ui --extra test setup.cfg -

# To be run regularly; then `make test`, and a commit.
renew:
	$(MAKE) lock UPGRADE=--upgrade
	deploy/image/renew-base

build/uv/bin/uv:
	$(PYTHON) -m venv build/uv
	build/uv/bin/pip install -qq --disable-pip-version-check 'uv>=0.5'

$(VENV)/packages-run:
	@$(call install,$(RUN_PACKAGES))
	@touch $@

$(VENV)/packages-lane:
	@$(call install,$(LANE_PACKAGES))
	@touch $@ $(VENV)/packages-run

$(VENV)/packages-test:
	@$(call install,$(TEST_PACKAGES))
	@touch $@ $(VENV)/packages-run

$(VENV)/packages-release: | $(VENV)/packages-test
	@$(call install,$(RELEASE_PACKAGES))
	@touch $@

# Sanitizers of the installed clang's version.
$(VENV)/packages-fuzz: | $(VENV)/packages-test
	@$(call install,libclang-rt-$(shell clang -dumpversion | cut -d. -f1)-dev)
	@touch $@

$(VENV)/packages-bench: | $(VENV)/packages-run
	@$(call install,$(BENCH_PACKAGES))
	@touch $@

# The virtual environment sees Debian's python3-bpfcc, which PyPI does not have. Another apt may run:
# install waits for dpkg's lock by itself, update for its own lock does not.
define install
{ dpkg --status $(1) >/dev/null 2>&1 || { \
	until said=$$(LC_ALL=C apt-get update -qq 2>&1); do case $$said in \
		*"Could not get lock"*) sleep 1 ;; *) echo "$$said" >&2; exit 1 ;; esac; done && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-upgrade \
		--no-install-recommends -o DPkg::Lock::Timeout=600 $(1) >/dev/null; }; } && \
{ [ -x $(BIN)/python ] || $(PYTHON) -m venv --system-site-packages $(VENV); }
endef

# For vagrant/box.
lane-packages:
	@echo $(LANE_PACKAGES)

include vagrant/kernels/kernels.mk

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
