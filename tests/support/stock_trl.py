"""Runs TRL's script of a method on FSDP2 and CPU ranks: `torchrun ... stock_trl.py METHOD [TRL's arguments]`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "real" / "scripts"))

import as_fsdp

del as_fsdp
method = sys.argv.pop(1)
sys.argv += ["--fsdp", "--use_cpu", "true"]
runpy.run_module(f"trl.scripts.{method}", run_name="__main__")
