# SPDX-License-Identifier: Apache-2.0
# The kernel lab: the tests that need a kernel, on real 5.10, 6.1 and 6.12 (vagrant/README.md).
#   make test-kernels                    on all of them, what every change must pass
#   make test-kernels-all                on all of them, all that runs there
#   make test-kernel KERNEL=5.10         one; make test-kernel KERNEL=5.10 TESTS=tests/network
#   make kernel-shell KERNEL=5.10        look around in one
#   make verifier-table                  renew the verifier's budget
#   make test-bcc                        the same sources under Debian 13's BCC
LAB := $(PYTHON) -m vagrant.kernels
LAB_PACKAGES := qemu-system-x86 busybox-static kmod xz-utils zstd util-linux debian-archive-keyring

.PHONY: test-kernels test-kernels-all test-kernel kernel-shell verifier-table test-bcc

test-kernels: $(VENV)/test $(VENV)/packages-lab
	$(LAB) test

test-kernels-all: $(VENV)/test $(VENV)/packages-lab
	$(LAB) test-all

test-kernel: $(VENV)/test $(VENV)/packages-lab
	$(LAB) test $(KERNEL) $(if $(TESTS),-- $(TESTS))

kernel-shell: $(VENV)/test $(VENV)/packages-lab
	@$(LAB) shell $(KERNEL)

verifier-table: $(VENV)/test $(VENV)/packages-lab
	$(LAB) table

test-bcc:
	vagrant/bcc

$(VENV)/packages-lab: | $(VENV)/packages-test
	@$(call install,$(LAB_PACKAGES))
	@touch $@
