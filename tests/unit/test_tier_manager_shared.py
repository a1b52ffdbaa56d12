"""What others have put into a remote store is not put there again."""

from __future__ import annotations

from tier_rig import Rig, chain, names
from tokenmill.core.tiers import REMOTE, SaveTo


def test_what_came_from_a_remote_store_is_not_written_back() -> None:
    """Fetched and used again: it is there already, also at place 0."""
    rig = Rig(REMOTE)
    blocks = chain("shared", 3)
    assert [rig.put(REMOTE, facts) for facts in blocks] == [0, 1, 2]
    for _ in range(3):
        assert rig.fetch(names(blocks)) == {0, 1, 2}
        assert not rig.jobs_of(SaveTo)
    assert len(rig.kept[REMOTE]) == 3
