"""What a foreign key means: a table of rules per dialect, and the draft of settings that the rules fill in.

Every key of a file meets exactly one of three fates, which the draft writes down: it became settings of ours, it has no
effect and why, or it is an error that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import ConfigError
from ..parse import convert, describe


@dataclass(frozen=True)
class Fate:
    """What one key of the file came to: settings `(dotted path, value)`, a remark, or no effect at all."""

    key: str
    value: Any
    became: tuple[tuple[str, Any], ...] = ()
    remark: str = ""
    used: bool = False  # it counts although no setting of its own came of it

    @property
    def has_effect(self) -> bool:
        return bool(self.became) or self.used

    def __str__(self) -> str:
        if not self.became:
            return self.remark if self.used else f"no effect: {self.remark}"
        settings = ", ".join(f"{path}={show(value)}" for path, value in self.became)
        return f"-> {settings}" + (f" ({self.remark})" if self.remark else "")


@dataclass
class Draft:
    """Settings in our sections, as the rules of one dialect build them up."""

    settings: dict = field(default_factory=dict)
    fates: list[Fate] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # by canonical key
    ours: dict = field(default_factory=dict)  # what the command line adds in our sections
    _set_by: dict[str, str] = field(default_factory=dict)
    key: str = ""  # that a rule is acting on
    _became: list[tuple[str, Any]] = field(default_factory=list)
    _remark: str = ""
    _used: bool = False

    def set(self, path: str, value: Any) -> None:
        """Sets one of our settings; another key of the file that set it to something else is an error."""
        *sections, last = path.split(".")
        target = self.settings
        for part in sections:
            target = target.setdefault(part, {})
        if path in self._set_by and target[last] != value:
            raise ConfigError(
                f"{self.key}: it means {path}={show(value)}, but {self._set_by[path]} means {path}="
                f"{show(target[last])}; leave one of them out"
            )
        target[last] = value
        self._set_by[path] = self.key
        self._became.append((path, value))

    def get(self, path: str, default: Any = None) -> Any:
        target: Any = self.settings
        for part in path.split("."):
            if not isinstance(target, dict) or part not in target:
                return default
            target = target[part]
        return target

    def remark(self, text: str, *, used: bool = False) -> None:
        """Adds why to the key's fate. `used`: it counts, although it sets nothing."""
        self._remark, self._used = text, used

    def apply(self, key: str, value: Any, act: Callable[[Draft, Any], None]) -> None:
        self.key, self._became, self._remark, self._used = key, [], "", False
        act(self, value)
        self.fates.append(Fate(key, value, tuple(self._became), self._remark, self._used))

    def imply(self, what: str, path: str, value: Any, why: str) -> None:
        """A setting that the dialect brings along without a key of its own, unless a key has set it."""
        if self.get(path) is None:
            self.apply(what, None, lambda draft, _: draft.set(path, value))
            self.fates[-1] = dataclasses.replace(self.fates[-1], remark=why)


def is_known(path: str) -> bool:
    """Whether there is such a setting of ours."""
    from ..parse import known_keys

    return path in known_keys()


@dataclass(frozen=True)
class Rule:
    """`kind` is the type of the value, as in the config's dataclasses; `act` fills the draft."""

    kind: Any
    help: str
    act: Callable[[Draft, Any], None]


def becomes(path: str, kind: Any, via: Callable[[Any], Any] | None = None) -> Rule:
    """The value, or what `via` makes of it, is our setting `path`."""
    return Rule(kind, f"-> {path}", lambda draft, value: draft.set(path, via(value) if via is not None else value))


def no_effect(why: str, kind: Any = Any) -> Rule:
    """Accepted and told: it means nothing here."""
    return Rule(kind, f"no effect: {why}", lambda draft, _: draft.remark(why))


def only(kind: Any, allowed: Iterable[Any], why: str, otherwise: str) -> Rule:
    """No effect when it is what we do anyway; any other value is an error that says the way out."""
    allowed = tuple(allowed)

    def act(draft: Draft, value: Any) -> None:
        if value not in allowed:
            raise ConfigError(f"{draft.key}: got {show(value)}; {otherwise}")
        draft.remark(f"as it is: {why}", used=True)

    return Rule(kind, f"{' or '.join(map(show, allowed))} only: {why}", act)


DTYPE_NAMES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "half": "float16",
    "fp32": "float32", "float32": "float32", "float": "float32",
}  # fmt: skip


def dtype_named(key: str, name: str) -> str:
    name = name.removeprefix("torch.")
    if name not in DTYPE_NAMES:
        near = difflib.get_close_matches(name, DTYPE_NAMES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{key}: got {name!r}, expected one of {', '.join(DTYPE_NAMES)}; the nearest is {near}")
    return DTYPE_NAMES[name]


@dataclass(frozen=True)
class ForeignSetting:
    """One key of the file: as the table calls it, as the user wrote it, its value, and why it has no part, if so."""

    canonical: str
    shown: str
    value: Any
    inert: str = ""


def leaves(canonical: str, shown: str, value: Any, keys: Mapping[str, Rule], inert: str = "") -> list[ForeignSetting]:
    """The keys below one node of the file; a mapping is a leaf where the table has a rule for it."""
    if canonical not in keys and isinstance(value, Mapping) and value:
        return [
            leaf
            for name, inner in value.items()
            for leaf in leaves(f"{canonical}.{name}", f"{shown}.{name}", inner, keys, inert)
        ]
    if canonical not in keys and any(key.startswith(canonical + ".") for key in keys):
        if value not in (None, {}):
            raise ConfigError(f"{shown}: got {describe(value)}, expected a mapping")
        return []
    return [ForeignSetting(canonical, shown, value, inert)]


def check_keys(items: list[ForeignSetting], keys: Mapping[str, Rule], what: str) -> None:
    for item in items:
        if item.canonical not in keys:
            raise ConfigError(unknown(item.canonical, item.shown, keys, what))


def apply_rules(draft: Draft, items: list[ForeignSetting], keys: Mapping[str, Rule]) -> None:
    """All values are checked before any rule acts, so that rules may look at other keys in `draft.values`."""
    values = []
    for item in items:
        kind = keys[item.canonical].kind
        values.append(item.value if kind is Any else convert(kind, item.value, item.shown))
        if not item.inert:
            draft.values[item.canonical] = values[-1]
    for item, value in zip(items, values, strict=True):
        if item.inert:
            draft.fates.append(Fate(item.shown, value, remark=item.inert))
        else:
            draft.apply(item.shown, value, keys[item.canonical].act)


def unknown(canonical: str, shown: str, keys: Iterable[str], what: str) -> str:
    """The same last name elsewhere, else the nearest key of the same section, else any spelling."""
    keys = list(keys)
    section, _, last = canonical.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    near = [key for key in keys if key.rpartition(".")[2] == last]
    near = near or [siblings[name] for name in difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)]
    near = near or difflib.get_close_matches(canonical, keys, n=1, cutoff=0.0)
    return f"unknown key {shown}; the nearest one of {what} is {near[0]}"


def show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass
class Translation:
    """A file in our sections, with what became of each key and what is missing before it can run."""

    dialect: str
    settings: dict
    fates: list[Fate] = dataclasses.field(default_factory=list)
    needs: list[str] = dataclasses.field(default_factory=list)

    def without_effect(self) -> list[str]:
        """One sentence per reason, with all keys that it holds for."""
        by_reason: dict[str, list[str]] = {}
        for fate in self.fates:
            if not fate.has_effect:
                by_reason.setdefault(fate.remark, []).append(fate.key)
        return [f"no effect: {', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]
