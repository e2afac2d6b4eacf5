"""`torchrun -m fsdp2x.train CONFIG.yaml ...`: the same as `fsdp2x train CONFIG.yaml ...`."""

import sys

from fsdp2x.train.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
