"""Translates a config of another trainer into fsdp2x's keys or TRL's, by the table `keys.yaml`, which says how.

Nothing runs in another trainer's keys: its user reads and keeps the result. Every key of the file becomes a setting,
or is dropped for a reason, or raises an error that names it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp2x.base.failures import ConfigError
from fsdp2x.train.config import SECTIONS
from fsdp2x.train.parse import describe, foreign_keys, load_yaml, name_of, refuse_unknown, set_path, show

To = Literal["train", "sft", "grpo"]
COLUMNS = {"train": ("train",), "sft": ("sft", "trl"), "grpo": ("grpo", "trl")}
_UNKNOWN = object()


class Dropped(Exception):
    """A key without effect, and why."""


@dataclass
class Translation:
    """The settings for `to`, the key that made each of them by path, why keys were dropped, and keys by note."""

    title: str
    to: To
    settings: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def set(self, path: str, value: Any, key: str) -> None:
        """Sets a path. Another key of the file that set it differently is an error."""
        if path in self.made_by and (former := _look_up(self.settings, path)) != value:
            other = self.made_by[path]
            raise ConfigError(
                f"{key}: it means {path}={show(value)}, but {other} means {path}={show(former)}. Omit one of them."
            )
        self.made_by[path] = key
        set_path(self.settings, path.split("."), value, "")


def translate(settings: Mapping[str, Any], *, to: To | None = None, role: str | None = None) -> Translation:
    """Translates a file. `to`: by default grpo if a key samples responses, else what the format is for.

    Raises:
        ConfigError: the file has no known format, a key is unknown (the message names the nearest), there are several
            roles and none is named, two keys contradict each other, or a reference leads nowhere.
    """
    own, table = own_sections(settings), find_format(settings)
    if own or table is None:
        has = f"fsdp2x's own sections ({', '.join(own)})" if own else "no key of a trainer that fsdp2x knows"
        raise ConfigError(f"the file has {has}, so there is nothing to translate")
    if "instead" in table:
        raise ConfigError(f"the file has {table['title']}. {table['instead']}")
    if "run" in table and to not in (None, table["to"]):
        raise ConfigError(f"--to {to}: the file has {table['title']}, for fsdp2x trl {table['to']} alone. Omit --to.")
    form = Format(table)
    form.choose(settings, to, role)
    form.refuse_unknown(settings)  # misspelled keys come before the references that they break
    found, leaves = Translation(table["title"], form.to), form.leaves(interpolate(settings))
    given = {form.find(key)[0]: value for key, value in leaves.items()}
    for key, value in leaves.items():
        row = Row(key, form.column(key), given)
        try:
            made = row.apply(value)
        except Dropped as reason:
            found.dropped[form.unused_role(key) or key] = str(reason)
            continue
        for path, setting in made.items():
            if setting is not None or form.to == "train":
                found.set(path, setting, key)
        for note in row.notes:
            found.notes.setdefault(note, []).append(key)
    for path, default in table.get("defaults", {}).get(form.to, {}).items():
        column = {"to": path, **(default if isinstance(default, dict) else {"value": default})}
        with contextlib.suppress(Dropped):
            if path not in found.made_by:
                set_path(found.settings, path.split("."), Row(path, column, given).apply(None)[path], "")
    return found


def own_sections(settings: Mapping[str, Any]) -> list[str]:
    """Returns the sections of fsdp2x in a file. Flags of others have such names with plain values."""
    return [key for key, value in settings.items() if key in SECTIONS and isinstance(value, Mapping | None)]


def find_format(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the format that knows most of the top-level keys, or None if none knows one."""
    forms = [*foreign_keys()["formats"].values()]
    num_known = [sum(Format(form).has(str(key)) for key in settings) for form in forms]
    return forms[num_known.index(max(num_known))] if any(num_known) else None


def describe_format(table: dict[str, Any], settings: Mapping[str, Any], path: str) -> str:
    """Returns what a file of another trainer is, how to use it, and the names of its keys for `fsdp2x train`."""
    what = table["title"]
    if "instead" in table:
        return f"{path}: the file has {what}. {table['instead'].replace('FILE', path)}"
    translating = f"`fsdp2x config translate {path} > mine.yaml`"
    if "run" not in table:
        return f"{path}: the file has {what}. Translate it with {translating}, and use mine.yaml."
    names = [f"{key} is {name}" for key in settings if (name := name_of(str(key)))]
    return (
        f"{path}: the file has {what}. Run that trainer on fsdp2x: `{table['run'].replace('FILE', path)}`. Or "
        f"translate it with {translating}, and use `fsdp2x trl {table['to']} --config mine.yaml`. Names in "
        f"`fsdp2x train`: {', '.join(names) or 'none'}."
    )


def _look_up(settings: Any, path: str) -> Any:
    for part in path.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


class Format:
    """The rows of a format, and which role of a file is translated to what."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.rows, self.roles, self._prefixes = table["keys"], table.get("roles", []), table.get("prefixes", {})
        self.rows = {**self.rows, **{name: {"trl": name} for name in table.get("same", "").split()}}
        self.role: str | None = None
        self.to: To = table.get("to", "train")
        self.rest: str | None = table.get("rest")
        known = [key.split(".") for key in (*self.rows, *(f"{role}." for role in self.roles))]
        self._blocks = {".".join(parts[:end]) for parts in known for end in range(1, len(parts))}

    def choose(self, settings: Mapping[str, Any], to: To | None, role: str | None) -> None:
        """Chooses what to translate to, and the role."""
        present = [one for one in self.roles if _look_up(settings, one) is not None]
        if role is not None:
            self.role = next((one for one in present if role in (one, one.rpartition(".")[2])), None)
            if self.role is None:
                raise ConfigError(f"--role: got {role}, but the file has {', '.join(present) or 'no roles'}")
        rows = (self.find(key)[1] for key in self.leaves(settings))
        if any(isinstance(row, dict) and list(row) == ["grpo"] for row in rows) and self.role in (None, *present[:1]):
            self.to = "grpo"
        self.to = to or self.to
        if self.role is None and len(present) > 1 and self.to == "train":
            raise ConfigError(f"the file has the roles {', '.join(present)}. Say which one with --role.")
        self.role = self.role or next(iter(present), None)

    def _split(self, path: str) -> tuple[str | None, str]:
        """Returns the role of a path, and the rest."""
        role = next((one for one in self.roles if path.startswith(f"{one}.")), None)
        inner = path if role is None else path.removeprefix(f"{role}.")
        for long, short in self._prefixes.items():
            inner = short + inner.removeprefix(long) if f"{inner}.".startswith(f"{long}.") else inner
        return role, inner

    def find(self, path: str) -> tuple[str, Any]:
        """Returns the name of a key in conditions, and its row, or `_UNKNOWN`."""
        role, inner = self._split(path)
        if role in (None, self.role):
            return inner, self._row(inner)
        row = self._row(path)
        return path, {} if row is _UNKNOWN and self._row(inner) is not _UNKNOWN else row

    def _row(self, name: str) -> Any:
        starred = (key for key in self.rows if key.endswith("*") and name.startswith(key[:-1]))
        return self.rows.get(name, self.rows.get(max(starred, key=len, default=""), _UNKNOWN))

    def has(self, path: str) -> bool:
        """Returns whether a path is a key, or a block of keys."""
        return self.find(path)[1] is not _UNKNOWN or not self._blocks.isdisjoint((path, self._split(path)[1]))

    def leaves(self, settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """Returns the keys of a file with their values. A mapping is the value of a key if there is a row for it."""
        found: dict[str, Any] = {}
        for name, value in settings.items():
            path = f"{prefix}{name}"
            is_row = self.find(path)[1] is not _UNKNOWN
            if isinstance(value, Mapping) and value and not is_row:
                found |= self.leaves(value, f"{path}.")
            elif is_row or not self.has(path):
                found[path] = value
            elif value not in (None, {}):
                raise ConfigError(f"{path}: got {describe(value)}, expected a mapping")
        return found

    def refuse_unknown(self, settings: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for unknown keys. A misspelled block reports one key."""
        if self.rest is not None:
            return
        unknown: dict[str, str] = {}
        for path in self.leaves(settings):
            parts = itertools.accumulate(path.split("."), lambda one, two: f"{one}.{two}")
            for wrong in itertools.islice((part for part in parts if not self.has(part)), 1):
                unknown[wrong] = self._split(wrong)[1]
        refuse_unknown(unknown, [*self.rows, *self._blocks])

    def _columns(self, path: str) -> list:
        row = self.find(path)[1]
        row = self.rest if row is _UNKNOWN else row
        return [row[name] for name in COLUMNS[self.to] if name in row] if isinstance(row, dict) else [row]

    def unused_role(self, path: str) -> str | None:
        """Returns the role of a key without a column, if another one is translated."""
        role = self._split(path)[0]
        return None if role == self.role or self._columns(path) else role

    def column(self, path: str) -> Any:
        """Returns the column of a key for what is translated to, or the reason why there is none."""
        otherwise = "training on text has no such setting" if self.to == "train" else "TRL has no such setting"
        if self.unused_role(path):
            otherwise = f"this run is the role {self.role}"
        return next(iter(self._columns(path)), otherwise)


class Row:
    """The column of a key, applied to its value. `given`: the values of all keys of the file."""

    def __init__(self, key: str, column: Any, given: Mapping[str, Any]) -> None:
        self.key, self.column, self.given = key, column, given
        self.notes: list[str] = []

    def apply(self, value: Any) -> dict[str, Any]:
        """Returns settings by path. Raises `Dropped` if no column has one."""
        made: dict[str, Any] = {}
        reasons = []
        for column in _listed(self.column):
            try:
                made |= self._apply(column, value)
            except Dropped as reason:
                reasons.append(reason)
        if len(reasons) == len(_listed(self.column)):
            raise reasons[0]
        return made

    def _apply(self, column: Any, value: Any) -> dict[str, Any]:
        if column is None:
            return {}
        if isinstance(column, str):
            return {_setting(column): value}
        for word, wanted in (("if", True), ("unless", False)):
            for condition in _listed(column.get(word, [])):
                name, equals, expected = condition.partition("=")
                other = self.given.get(name)
                if (show(other) == expected if equals else other not in (None, False)) is not wanted:
                    raise Dropped(f"{condition} is {'not ' if wanted else ''}given")
        if "neutral" in column:
            if value == column["neutral"]:
                return {}
            raise Dropped(column["why"])
        if "count" in column:
            value = count_devices(self.key, value)
        changes = {"*": column["value"]} if "value" in column else column.get("map", {})
        name = value if isinstance(value, Hashable) and value in changes else "*"
        if name in changes:
            value = self._filled(_setting(changes[name]), value)
        self.notes += _listed(column.get("note", []))
        if value is not None and {"plus", "times", "over"} & column.keys():
            value = self._computed(value, *(_listed(column.get(word, [])) for word in ("times", "over", "plus")))
        return dict.fromkeys(_listed(column["to"]), value)

    def _filled(self, template: Any, value: Any) -> Any:
        if isinstance(template, list):
            return [self._filled(one, value) for one in template]
        if isinstance(template, dict):
            return {key: self._filled(one, value) for key, one in template.items()}
        if isinstance(template, str) and template.startswith("$"):
            return value if template == "$" else self._other(template[1:])
        return template

    def _other(self, text: str) -> Any:
        """Returns the value of KEY=DEFAULT."""
        name, equals, default = text.partition("=")
        if self.given.get(name) is None and not equals:
            raise Dropped(f"it needs {name}")
        return load_yaml(default, "keys.yaml") if self.given.get(name) is None else self.given[name]

    def _computed(self, value: Any, times: list, over: list, plus: list) -> Any:
        def number(operand: Any) -> Any:
            found = self._other(operand) if isinstance(operand, str) else operand
            if type(found) not in (int, float):
                raise ConfigError(f"{self.key}: got {describe(found)}, expected a number")
            return found

        result = math.prod(map(number, times), start=value if type(value) is int else number(value))
        divisor = math.prod(map(number, over))
        if divisor < 1 or (over and result % divisor):
            raise ConfigError(f"{self.key}: {result} is no multiple of {divisor} ({' x '.join(map(str, over))})")
        result = result // divisor if over else result
        return round(result + sum(plus), 9)


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _setting(text: Any) -> Any:
    """Returns a text of the table, or raises `Dropped` if it is a reason."""
    if isinstance(text, str) and " " in text:
        raise Dropped(text)
    return text


def count_devices(key: str, value: Any) -> int:
    """Counts the ids of `[0, 1]` or of the text `list(range(0,2))`, which is parsed and never executed."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return len(value)
    found = re.fullmatch(r"\s*(?:list\()?range\(\s*(?:(\d{1,9})\s*,\s*)?(\d{1,9})\s*\)\)?\s*", str(value))
    if found is None or (count := int(found[2]) - int(found[1] or 0)) < 1:
        raise ConfigError(f"{key}: got {value!r}, expected device ids: [0, 1] or list(range(0,2))")
    return count


# ---- references inside a file: `${models.policy_trainer.num_gpu}` is replaced by the value of that key

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_DEPTH = 20
MOST_REFERENCES = 10_000
MOST_CHARACTERS = 1 << 20


def interpolate(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy without references. A value that is one reference keeps its type. Inside other text it is text.

    Raises:
        ConfigError: a key is missing or a mapping, a reference leads in a circle or would have to be computed
            (`${name:...}`), or there are more than `MOST_REFERENCES`, each counted as often as it is followed.
    """
    followed = itertools.count(1)

    def resolve(value: Any, key: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ConfigError(f"{key}: its references lead in a circle")
        if isinstance(value, Mapping):
            return {name: resolve(inner, f"{key}.{name}" if key else str(name), depth) for name, inner in value.items()}
        if isinstance(value, list):
            return [resolve(inner, f"{key}[{index}]", depth) for index, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = REFERENCE.fullmatch(value.strip())
        found = follow(whole, key, depth) if whole else REFERENCE.sub(lambda one: str(follow(one, key, depth)), value)
        if isinstance(found, str) and (len(found) > MOST_CHARACTERS or "${" in found):
            raise ConfigError(f"{key}: {value[:200]!r} is not a reference of the form ${{section.key}}, or too long")
        return found

    def follow(reference: re.Match, key: str, depth: int) -> Any:
        value = _look_up(settings, reference[1].strip())
        if value is None or isinstance(value, Mapping):
            wrong = "would have to be computed. Write its value." if ":" in reference[1] else "is no key with a value"
            raise ConfigError(f"{key}: {reference[0]} {wrong}")
        if next(followed) > MOST_REFERENCES:
            raise ConfigError(f"{key}: its references lead to more references than any config needs")
        return resolve(value, key, depth + 1)

    return resolve(settings, "", 0)
