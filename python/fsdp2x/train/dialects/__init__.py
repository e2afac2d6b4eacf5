"""Which dialect a config is written in, told by its keys, and its translation into our own sections.

A dialect is a `Dialect`: a table of rows, and how its keys are found. fsdp2x's own sections need no translation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import ConfigError, TrainConfig
from ..parse import apply_overrides, first_leaf, known_keys, read_overrides, read_yaml, unknown_key_message
from .by_role import BY_ROLE
from .draft import Translation, check_keys, draw_up
from .flat import FLAT
from .interpolate import interpolate
from .nested import NESTED
from .rules import Dialect, Fate, refuse_role, unknown

__all__ = ["DIALECTS", "OWN", "TITLES", "Translation", "translate", "translate_file"]

DIALECTS = (FLAT, BY_ROLE, NESTED)
OWN = "sections"
TITLES = {OWN: "fsdp2x's own sections", **{dialect.name: dialect.title for dialect in DIALECTS}}
SECTIONS = tuple(field.name for field in dataclasses.fields(TrainConfig))


def translate_file(path: str | Path, overrides: Iterable[str] = ()) -> Translation:
    """Reads a YAML file of any dialect. `overrides` are `key=value` in the file's dialect, or in our sections."""
    return translate(read_yaml(path), overrides)


def translate(settings: Mapping[str, Any], overrides: Iterable[str] = ()) -> Translation:
    """The settings of `TrainConfig` from a mapping of any dialect.

    Raises:
        ConfigError: keys of two dialects in one mapping, an unknown key (with the nearest one), a value of the wrong
            type, or one that cannot be had here.
    """
    overrides = list(overrides)
    ours, theirs, role = [], [], None
    for text, (key, value) in zip(overrides, read_overrides(overrides), strict=True):
        if key == "role":
            role = str(value)
        elif key.partition(".")[0] in SECTIONS:
            ours.append(text)
        else:
            theirs.append(text)
    settings = apply_overrides(settings, theirs)
    dialect = detect(settings)
    if dialect is None:
        refuse_role(role, TITLES[OWN])
        merged = apply_overrides(settings, ours)
        _check_sections(merged)
        return Translation(OWN, merged, needs=_needs(merged))
    # A misspelt key is told before the references that it breaks.
    check_keys(dialect.read(settings, role), dialect)
    found = draw_up(dialect.read(interpolate(settings), role), dialect, apply_overrides({}, ours))
    merged = apply_overrides(found.settings, ours)
    _check_sections(merged)
    fates = [Fate({}, "of the command line", True, key, value) for key, value in read_overrides(ours)]
    needs = [] if any(text.startswith("model.") for text in ours) else found.needs
    return Translation(dialect.name, merged, [*found.fates, *fates], [*needs, *_needs(merged)])


def detect(settings: Mapping[str, Any]) -> Dialect | None:
    """The dialect that owns the top-level keys; None: our own sections. A key of two dialects decides nothing alone."""
    owners = {key: _owners(str(key), value) for key, value in settings.items()}
    surely: dict[str, str] = {}
    for key, names in owners.items():
        if len(names) == 1:
            surely.setdefault(names[0], key)
    if len(surely) > 1:
        raise ConfigError(_mixed(surely))
    name = next(iter(surely), None) or next((names[0] for names in owners.values() if names), None)
    if name is None and settings:
        key = next(iter(settings))
        raise ConfigError(_nearest_of_all(str(key), settings[key]))
    return next((dialect for dialect in DIALECTS if dialect.name == name), None)


def _owners(key: str, value: Any) -> list[str]:
    own = [OWN] if key in SECTIONS else []
    return own + [dialect.name for dialect in DIALECTS if dialect.owns(key, value)]


def _mixed(owners: Mapping[str, str]) -> str:
    parts = " and ".join(f"{key} of {TITLES[name]}" for name, key in owners.items())
    hint = ""
    if OWN in owners and FLAT.name in owners:
        row = FLAT.keys[owners[FLAT.name]]
        hint = f" (in sections: {row.help.removeprefix('-> ')})" if row.to else ""
    return f"the file mixes {parts}{hint}; write it in one of them, the rest can go on the command line"


def _nearest_of_all(key: str, value: Any) -> str:
    """For a file that no dialect owns: its first key is a slip, or belongs to something else."""
    path = first_leaf(key, value)
    known = {**dict.fromkeys(known_keys()), **dict.fromkeys(SECTIONS)}
    for dialect in DIALECTS:
        known |= dict.fromkeys(dialect.keys)
    return unknown(path, path, known, "all dialects")


def _check_sections(settings: Mapping[str, Any]) -> None:
    """Unknown keys of our own sections, before anything is said to be missing."""
    known = known_keys()
    for section, values in settings.items():
        if section not in SECTIONS:
            raise ConfigError(unknown_key_message(first_leaf(str(section), values)))
        for name in values if isinstance(values, Mapping) else ():
            if f"{section}.{name}" not in known:
                raise ConfigError(unknown_key_message(first_leaf(f"{section}.{name}", values[name])))


def _needs(settings: Mapping[str, Any]) -> list[str]:
    """What a run must be told beside these settings."""

    def given(section: str, *names: str) -> bool:
        values = settings.get(section)
        return isinstance(values, Mapping) and any(values.get(name) for name in names)

    needs = []
    if not given("model", "config", "path"):
        needs.append("model.path=FOLDER or model.config={model_type: ...}: the model")
    if not given("data", "files"):
        needs.append("data.files=FILES: the text")
    return needs
