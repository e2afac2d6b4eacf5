"""All keys of a dialect with type, default and meaning, read from the dataclasses and the tables of rules."""

from __future__ import annotations

from typing import Any

from .dialects import DIALECTS, OWN
from .parse import known_keys, type_name


def list_keys(dialect: str = OWN) -> dict[str, dict[str, Any]]:
    """Keys of one dialect by NAME, of our own sections ("sections"), or of everything ("all").

    Each with its ``type`` and ``help``; the sections' with their ``default``.
    """
    rows: dict[str, dict[str, Any]] = {}
    if dialect in (OWN, "all"):
        rows |= {
            key: {"type": type_name(kind), "default": default, "help": help}
            for key, (kind, default, help) in known_keys().items()
        }
    for other in DIALECTS:
        if dialect in (other.name, "all"):
            rows |= {key: {"type": type_name(rule.kind), "help": rule.help} for key, rule in other.keys.items()}
    return rows
