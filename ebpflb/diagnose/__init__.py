# SPDX-License-Identifier: Apache-2.0
"""What an operator asks, answered from the pins and the kernel alone: no agent need run."""
