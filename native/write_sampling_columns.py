"""Writes the C header of the settings that a draw is told of: python native/write_sampling_columns.py FILE.

The table is src/tokenmill/core/sampling.py, which needs the standard library only. Run it with -S: an editable
installation of another tree would come before this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from tokenmill.core.sampling import native_header

if __name__ == "__main__":
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    Path(sys.argv[1]).write_text(native_header(), encoding="utf8")
