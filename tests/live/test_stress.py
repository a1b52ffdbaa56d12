"""A small `make stress`: mixed concurrent requests end, equal their solo runs, and leave nothing behind."""

from __future__ import annotations

import pytest
import stress

pytestmark = [pytest.mark.slow, pytest.mark.exact]


@pytest.mark.sampled(1 / 3)
def test_mixed_requests_equal_their_solo_runs_and_leave_nothing(smollm2):
    report = stress.run(num_requests=24, max_tokens=512, num_rounds=3, seed=1, backend="native")
    print("\n".join(report.lines))
    assert not report.problems, "\n".join(report.problems)
