"""`python -m tokenmill`: the command, by the interpreter that is named."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
