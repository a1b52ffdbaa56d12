"""Writes the C header of the settings that a draw is told of: python native/write_sampling_columns.py FILE.

The table is src/tokenmill/core/sampling.py, which needs the standard library only. Run it with -S: an editable
installation of another tree would come before this one. A file that says the same already is left as it is, so that
other edits of the table compile nothing again.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from tokenmill.core.sampling import native_header

if __name__ == "__main__":
    header, text = Path(sys.argv[1]), native_header()
    if not header.is_file() or header.read_text(encoding="utf8") != text:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text, encoding="utf8")
