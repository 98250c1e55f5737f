# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md says what the code does."""

from tests.config import page


def test_current() -> None:
    """The tables are those of the code: `python -m tests.config.page` writes them again."""
    text = page.PAGE.read_text()
    assert all(begin in text for begin in page.TABLES)
    assert text == page.current(text)
