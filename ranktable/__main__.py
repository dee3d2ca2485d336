"""`python -m ranktable` is the `ranktable` command."""

import sys

from ranktable.cli import main

if __name__ == "__main__":
    sys.exit(main())
