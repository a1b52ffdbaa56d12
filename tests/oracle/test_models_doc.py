"""docs/use/models.md says what the code and the tests say."""

from __future__ import annotations

from make_models_doc import PAGE, page

from tokenmill.models.families import HF_FAMILIES
from tokenmill.models.repack import BLOCK_KINDS, DIRECT_KINDS


def test_the_page_is_up_to_date() -> None:
    """Else run `python tests/oracle/make_models_doc.py`."""
    assert PAGE.read_text() == page()


def test_enough_is_covered() -> None:
    assert len(HF_FAMILIES) >= 14 and len(BLOCK_KINDS) + len(DIRECT_KINDS) >= 16
