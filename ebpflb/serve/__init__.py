# SPDX-License-Identifier: Apache-2.0
"""What others may ask of a running agent."""
