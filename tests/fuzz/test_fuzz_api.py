"""Some hundred calls drawn from the served document, as often as the tests run; `make fuzz` makes 10,000."""

from __future__ import annotations

import pytest
from fuzz_api import ENVIRONMENT, fuzz


def test_no_call_that_the_document_allows_breaks_the_server() -> None:
    """Nor one that it does not allow: no 5xx, no answer in another form, no request left, no task, no descriptor."""
    if not (ENVIRONMENT / "bin" / "st").exists():
        pytest.skip(f"schemathesis is not there ({ENVIRONMENT}); make fuzz installs it")
    outcome = fuzz(examples=3, phases="examples,fuzzing")
    assert outcome.is_clean, outcome.report[-6000:]
    assert outcome.num_cases >= 200
    assert outcome.num_ended >= 15, "few calls came to the engine: the schemas do not fit what is taken"
