# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md says what the code does."""

from tests.config import page


def test_the_page_has_the_table_of_the_code() -> None:
    """The table matches the code: `python -m tests.config.page` writes it again."""
    text = page.PAGE.read_text()
    assert page.BEGIN in text
    assert text == page.current(text)
