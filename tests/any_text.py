"""Texts of any characters that can be encoded."""

from typing import Any

from hypothesis import strategies as st

CHARACTERS = st.characters(exclude_categories=["Cs"])
"""Those of ``st.text()``, which takes 2.3 s to find them: it encodes every one."""


def any_text(**sizes: Any) -> st.SearchStrategy[str]:
    """Return a strategy; sizes are those of ``st.text``."""
    return st.text(CHARACTERS, **sizes)
