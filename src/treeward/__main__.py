"""`python -m treeward`: the command of the same name."""

from __future__ import annotations

import sys

from treeward.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
