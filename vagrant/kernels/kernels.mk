# SPDX-License-Identifier: Apache-2.0
# The kernel lab: the tests that need a kernel, on real 5.10, 6.1 and 6.12 (vagrant/README.md).
#   make test-kernels                    on all of them, what every change must pass
#   make test-kernels-all                on all of them, all that runs there
#   make test-kernel KERNEL=5.10         one; make test-kernel KERNEL=5.10 TESTS=tests/network
#   make test-arm64                      what runs on an arm64 kernel, emulated
#   make test-apparmor                   the agent under its AppArmor profile, on 6.1 and 6.12
#   make test-without-iptables           a machine without iptables, nft and x_tables, on 6.12
#   make kernel-shell KERNEL=5.10        look around in one
#   make verifier-table                  renew the verifier's budget
#   make test-bcc                        the same sources under the other distribution's BCC
LAB := $(PYTHON) -m vagrant.kernels
LAB_PACKAGES := qemu-system-x86 busybox-static kmod xz-utils zstd util-linux debian-archive-keyring \
	debootstrap apparmor

ARM64_PACKAGES := qemu-system-arm mmdebstrap

.PHONY: test-kernels test-kernels-all test-kernel test-arm64 test-apparmor \
	test-without-iptables kernel-shell verifier-table test-bcc

test-kernels: $(VENV)/test $(VENV)/packages-lab
	$(LAB) test

test-kernels-all: $(VENV)/test $(VENV)/packages-lab
	$(LAB) test-all

test-kernel: $(VENV)/test $(VENV)/packages-lab
	$(LAB) test $(KERNEL) $(if $(TESTS),-- $(TESTS))

test-arm64: $(VENV)/test $(VENV)/packages-lab $(VENV)/packages-arm64
	$(LAB) test-arm64

test-apparmor: $(VENV)/test $(VENV)/packages-lab
	$(LAB) test 6.1 6.12 -- tests/kernels/alone/test_apparmor.py

test-without-iptables: $(VENV)/test $(VENV)/packages-lab
	$(LAB) test 6.12 -- tests/kernels/alone/test_without_iptables.py

kernel-shell: $(VENV)/test $(VENV)/packages-lab
	@$(LAB) shell $(KERNEL)

verifier-table: $(VENV)/test $(VENV)/packages-lab
	LAB_RENEW=1 vagrant/bcc
	$(BIN)/python -m vagrant.kernels table

test-bcc: $(VENV)/test $(VENV)/packages-lab
	vagrant/bcc

$(VENV)/packages-arm64: | $(VENV)/packages-test
	@$(call install,$(ARM64_PACKAGES))
	@touch $@

$(VENV)/packages-lab: | $(VENV)/packages-test
	@$(call install,$(LAB_PACKAGES))
	@touch $@
