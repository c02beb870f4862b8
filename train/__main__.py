"""`python -m afinar.train`, which is the `afinar` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
