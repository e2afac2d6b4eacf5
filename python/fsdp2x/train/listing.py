"""All keys of a dialect with type, default and meaning, read from the dataclasses and the tables of rules."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any

from .config import TrainConfig
from .dialects import DIALECTS, OWN
from .dialects.rules import show
from .parse import known_keys, type_name


@dataclass(frozen=True)
class KeyRow:
    key: str
    type: str
    help: str
    default: Any = None
    has_default: bool = True

    @property
    def shown_default(self) -> str:
        return f" = {show(self.default)}" if self.has_default else ""


def list_keys(dialect: str = OWN) -> list[KeyRow]:
    """Rows of one dialect by NAME, of our own sections ("sections"), or of everything ("all")."""
    rows: list[KeyRow] = []
    if dialect in (OWN, "all"):
        types = _types(TrainConfig)
        rows += [
            KeyRow(key, type_name(types[key]), field.metadata["help"], _default(field))
            for key, field in known_keys().items()
        ]
    for other in DIALECTS:
        if dialect in (other.name, "all"):
            rows += [
                KeyRow(key, type_name(rule.kind), rule.help, has_default=False) for key, rule in other.keys.items()
            ]
    return rows


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def _types(cls: type, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(cls).items():
        key = f"{path}.{name}" if path else name
        found |= _types(kind, key) if dataclasses.is_dataclass(kind) else {key: kind}
    return found
