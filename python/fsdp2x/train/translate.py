"""Translates keys of other trainers to settings of fsdp2x's sections, by tables of rows (`dialects.py`).

Every key of a file becomes settings, or has no effect for a reason, or raises an error that names it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fsdp2x.train.config import ConfigError
from fsdp2x.train.parse import convert, describe, known_keys, refuse_unknown, set_path, show


@dataclass(frozen=True)
class KeyResult:
    """The result of one key: settings by dotted path, a remark, or no effect at all."""

    became: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""
    used: bool = False  # whether it counts although it sets nothing
    key: str = ""  # as the user wrote it
    value: Any = None

    @property
    def has_effect(self) -> bool:
        return bool(self.became) or self.used

    def __str__(self) -> str:
        if not self.became:
            return self.remark if self.used else f"no effect: {self.remark}"
        settings = ", ".join(f"{path}={show(value)}" for path, value in self.became.items())
        return f"-> {settings}" + (f" ({self.remark})" if self.remark else "")


@dataclass(frozen=True)
class Row:
    """A row of a table: the settings `to` that get the value, unchanged or changed `by` something.

    `by` is a mapping (other values stay), or a function of the value and of the file's other keys. The function returns
    a value or a `KeyResult`, or raises a `ConfigError` without the key's name. `kind` is the type of the value, by
    default that of the first setting.
    """

    to: tuple[str, ...] = ()
    by: Mapping[Any, Any] | Callable[[Any, Mapping[str, Any]], Any] | None = None
    kind: Any = None
    note: str = ""  # in the list of keys, after its settings
    remark: str = ""  # next to its settings; for a row without settings, why it has no effect

    @property
    def help(self) -> str:
        if self.to:
            return f"-> {', '.join(self.to)}{self.note}"
        return self.note or f"no effect: {self.remark}"

    def apply(self, key: str, value: Any, given: Mapping[str, Any]) -> KeyResult:
        setting = value
        if isinstance(self.by, Mapping):
            setting = self.by.get(value, value)
        elif self.by is not None:
            try:
                setting = self.by(value, given)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from None
        result = setting if isinstance(setting, KeyResult) else KeyResult(dict.fromkeys(self.to, setting), self.remark)
        return replace(result, key=key, value=value)


def becomes(*to: str, by: Any = None, kind: Any = None, note: str = "", remark: str = "") -> Row:
    return Row(to, by, kind, note, remark)


def no_effect(why: str, *keys: str) -> dict[str, Row]:
    """Returns rows that are accepted, ignored, and reported."""
    return dict.fromkeys(keys, Row(remark=why))


def only(allowed: Any, why: str, otherwise: str, kind: Any = None) -> Row:
    """Returns a row for a fixed behavior of fsdp2x. Any other value is an error that says what to do."""

    def by(value: Any, _: Mapping[str, Any]) -> KeyResult:
        if value != allowed:
            raise ConfigError(f"got {show(value)}; {otherwise}")
        return KeyResult(remark=f"as it is: {why}", used=True)

    return Row(by=by, kind=kind or type(allowed), note=f"{show(allowed)} only: {why}")


def table(blocks: Mapping[str, Mapping[str, str | Row]], kinds: Mapping[str, Any] | None = None) -> dict[str, Row]:
    """Returns rows by dotted key from rows by block. A row that is a string is the setting that gets the value.

    `kinds` has the types of settings, by default those of fsdp2x's sections.
    """
    kinds = kinds or {key: known.kind for key, known in known_keys().items()}
    rows: dict[str, Row] = {}
    for block, keys in blocks.items():
        for key, row in keys.items():
            row = Row((row,)) if isinstance(row, str) else row
            kind = row.kind or (kinds[row.to[0]] if row.to else Any)
            rows[f"{block}.{key}" if block else key] = replace(row, kind=kind)
    return rows


@dataclass
class Translation:
    """A file in fsdp2x's sections, the result of each key, and what is missing before it can run."""

    dialect: str
    settings: dict = field(default_factory=dict)
    results: list[KeyResult] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # values of the file, by the table's keys
    title: str = "fsdp2x's own sections"  # of the dialect
    overridden: set[str] = field(default_factory=set)  # settings of the command line
    path: str = ""
    lines: dict[str, int] = field(default_factory=dict)  # of the file's keys

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Makes a `ConfigError` inside name the user's key and its line instead of the resulting setting."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(self.reword(str(error))) from error.__cause__

    def reword(self, message: str) -> str:
        names: dict[str, str] = {}
        for result in self.results:
            if not result.key.startswith("("):
                names |= {path: result.key for path in result.became if path not in {*names, *self.overridden}}
        if names:
            known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
            message = re.sub(rf"(?<![\w.])(?:{known})(?!\w|\.\w)", lambda found: names[found[0]], message)
        return "\n".join(map(self._with_line, message.split("\n")))

    def _with_line(self, sentence: str) -> str:
        found = re.match(r"(?:unknown key )?([^\s:]+?)(?:=\S*)?[.:,]? ", sentence)
        line = self.lines.get(found[1]) if found and found[1] not in self.overridden else None
        return sentence if line is None else f"{self.path}:{line}: {sentence}"

    def add(self, result: KeyResult) -> None:
        """Adds the settings of a key. Another key of the file that set them differently is an error."""
        for path, value in result.became.items():
            other = next((other for other in self.results if path in other.became), None)
            if other is not None and other.became[path] != value:
                raise ConfigError(
                    f"{result.key}: it means {path}={show(value)}, but {other.key} means {path}="
                    f"{show(other.became[path])}. Omit one of them."
                )
            set_path(self.settings, path.split("."), value, "")
        self.results.append(result)

    def imply(self, what: str, path: str, value: Any, why: str) -> None:
        """Adds a default setting of the dialect, unless a key has set it."""
        if not any(path in result.became for result in self.results):
            self.add(KeyResult({path: value}, why, key=what))

    @property
    def evaluates(self) -> bool:
        return any(result.became.get("train.mode") == "evaluate" for result in self.results)

    def without_effect(self) -> list[str]:
        """Returns one sentence per reason, with all keys that it applies to."""
        by_reason: dict[str, list[str]] = {}
        for result in self.results:
            if not result.has_effect:
                by_reason.setdefault(result.remark, []).append(result.key)
        return [f"no effect: {', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]


class ForeignKey(NamedTuple):
    """One key of the file: the table's name, the user's, its value, and why it has no effect, if so."""

    canonical: str
    shown: str
    value: Any
    inert: str = ""


def leaves(canonical: str, shown: str, value: Any, rows: Mapping[str, Row], inert: str = "") -> list[ForeignKey]:
    """Returns the keys of one branch of the file. A mapping is a leaf if the table has a row for it."""
    if canonical in rows or not (isinstance(value, Mapping) and value):
        if canonical in rows or not any(key.startswith(canonical + ".") for key in rows):
            return [ForeignKey(canonical, shown, value, inert)]
        if value not in (None, {}):
            raise ConfigError(f"{shown}: got {describe(value)}, expected a mapping")
        return []
    inner = [leaves(f"{canonical}.{name}", f"{shown}.{name}", one, rows, inert) for name, one in value.items()]
    return list(itertools.chain(*inner))


@dataclass(frozen=True)
class Dialect:
    """A format. `owns(key, value)` recognizes a top-level key, `read(settings, role)` finds the leaves of a file, and
    `finish(translation, ours)` adds implied settings after those of the command line."""

    name: str
    title: str
    rows: Mapping[str, Row]
    owns: Callable[[str, Any], bool]
    read: Callable[[Mapping[str, Any], str | None], list[ForeignKey]]
    finish: Callable[[Translation, Mapping[str, Any]], None] = lambda *_: None

    def translate(self, settings: Mapping[str, Any], role: str | None, ours: Mapping[str, Any]) -> Translation:
        """Translates a file. Checks all values before any row acts, because rows may read other keys of the file."""
        # Misspelled keys come before the references that they break. A misspelled block reports one key.
        unknown: dict[str, ForeignKey] = {}
        for leaf in self.read(settings, role):
            if leaf.canonical not in self.rows:
                unknown.setdefault(self._unknown_part(leaf.canonical), leaf)
        refuse_unknown({leaf.shown: leaf.canonical for leaf in unknown.values()}, self.rows)
        checked = [
            leaf._replace(value=convert(self.rows[leaf.canonical].kind, leaf.value, leaf.shown))
            for leaf in self.read(interpolate(settings), role)
        ]
        given = {leaf.canonical: leaf.value for leaf in checked if not leaf.inert}
        found = Translation(self.name, given=given, title=self.title)
        for canonical, shown, value, inert in checked:
            row = self.rows[canonical]
            found.add(KeyResult({}, inert, False, shown, value) if inert else row.apply(shown, value, found.given))
        self.finish(found, ours)
        return found

    def _unknown_part(self, canonical: str) -> str:
        """Returns the first part of a key that begins no known key."""
        parts = itertools.accumulate(canonical.split("."), lambda one, two: f"{one}.{two}")
        return next((part for part in parts if not any(f"{key}.".startswith(f"{part}.") for key in self.rows)), "")


# ---- references inside a file: `${models.policy_trainer.num_gpu}` is replaced by the value of that key

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_DEPTH = 20
MOST_REFERENCES = 10_000
MOST_CHARACTERS = 1 << 20


def interpolate(settings: Mapping) -> dict:
    """Returns a copy without references. A value that is one reference keeps its type. Inside other text it is text.

    Raises:
        ConfigError: a key is missing, a reference leads to a mapping or in a circle, there are more than
            `MOST_REFERENCES` (each counted as often as it is followed), or `${name:...}` would have to be computed.
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
        if whole is not None:
            return follow(whole[1], key, depth)
        text = REFERENCE.sub(lambda found: str(follow(found[1], key, depth)), value)
        if "${" in text:
            raise ConfigError(f"{key}: {value!r} is not a reference of the form ${{section.key}}")
        return text

    def follow(path: str, key: str, depth: int) -> Any:
        value: Any = settings
        for part in path.strip().split("."):
            if not isinstance(value, Mapping) or part not in value:
                computed = "would have to be computed. Write its value."
                why = computed if ":" in path else "refers to a key that is not in the file"
                raise ConfigError(f"{key}: ${{{path}}} {why}")
            value = value[part]
        if isinstance(value, Mapping):
            raise ConfigError(f"{key}: ${{{path}}} refers to a section, expected a single value")
        found = resolve(value, key, depth + 1)
        if next(followed) > MOST_REFERENCES or (isinstance(found, str) and len(found) > MOST_CHARACTERS):
            raise ConfigError(f"{key}: its references lead to more references, or to more text, than any config needs")
        return found

    return resolve(settings, "", 0)
