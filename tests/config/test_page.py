# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md says what the code does."""

from tests.config import page


def test_current() -> None:
    """The table is that of the code: `python -m tests.config.page` writes it again."""
    text = page.PAGE.read_text()
    assert page.BEGIN in text
    assert text == page.current(text)
