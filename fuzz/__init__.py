# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing, in the layout of OSS-Fuzz; see README.md."""
