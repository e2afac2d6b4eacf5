"""Keys of other trainers of policies."""

from __future__ import annotations

from fsdp2x.train.translate import Dialect

DIALECTS: tuple[Dialect, ...] = ()
