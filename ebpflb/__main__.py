# SPDX-License-Identifier: Apache-2.0
"""``python -m ebpflb`` is ``ebpflb``."""

from ebpflb.cli import main

main()
