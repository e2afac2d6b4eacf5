"""Models of bench_step.py and their names. Scripts that only show results import it, so it needs no package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    hidden: int
    layers: int
    tokens: int
    intermediate: int
    kind: str = "dense"

    @property
    def title(self) -> str:
        kind = {"dense": "", "moe": ", 8 experts", "lora": ", LoRA"}[self.kind]
        return f"{self.layers} layers of {self.hidden}{kind}, {self.tokens} tokens"


CASES = {
    "comm": Case(hidden=512, layers=12, tokens=16, intermediate=1536),
    "many": Case(hidden=64, layers=48, tokens=8, intermediate=176),
    "compute": Case(hidden=512, layers=12, tokens=512, intermediate=1536),
    "moe": Case(hidden=256, layers=8, tokens=32, intermediate=512, kind="moe"),
    "lora": Case(hidden=512, layers=12, tokens=16, intermediate=1536, kind="lora"),
}
