"""`python -m fsdp2x`: the command line."""

import sys

from fsdp2x.train.cli import main

if __name__ == "__main__":
    sys.exit(main())
