"""What a foreign key means is a row of a table; what a dialect is, a table of such rows and how its keys are found.

Every key of a file meets exactly one of three fates: it became settings of ours, it has no effect and why, or it is an
error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import ConfigError
from ..parse import describe, nearest_key

if TYPE_CHECKING:
    from .draft import Draft


@dataclass(frozen=True)
class Fate:
    """What one key came to: settings by dotted path, a remark, or no effect at all."""

    became: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""
    used: bool = False  # it counts although no setting of its own came of it
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
class Rule:
    """A row of a table.

    `kind` is the type of the value, as in the config's dataclasses. The value becomes each of our settings `to`, as it
    is or `by` a mapping (what it lacks stays as it is) or a function of the value and of the file's other keys. The
    function may return a `Fate` instead of a value, or raise a `ConfigError` without the key's name.
    """

    kind: Any
    to: tuple[str, ...] = ()
    by: Mapping[Any, Any] | Callable[[Any, Mapping[str, Any]], Any] | None = None
    note: str = ""  # in the list of keys, after what it becomes
    remark: str = ""  # beside its settings; of a row without any, why it has no effect

    @property
    def help(self) -> str:
        if self.to:
            return f"-> {', '.join(self.to)}{self.note}"
        return self.note or f"no effect: {self.remark}"

    def fate(self, key: str, value: Any, given: Mapping[str, Any]) -> Fate:
        setting = value
        if callable(self.by):
            try:
                setting = self.by(value, given)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from None
        elif self.by is not None:
            setting = self.by.get(value, value)
        found = setting if isinstance(setting, Fate) else Fate(dict.fromkeys(self.to, setting), self.remark)
        return Fate(found.became, found.remark, found.used, key, value)


def becomes(kind: Any, *to: str, by: Any = None, note: str = "", remark: str = "") -> Rule:
    return Rule(kind, to, by, note, remark)


def no_effect(why: str, kind: Any = Any) -> Rule:
    """Accepted and told: it means nothing here."""
    return Rule(kind, remark=why)


def always(what: bool, why: str, note: str) -> Rule:
    """What we do anyway: it counts when the file says the same, and has no effect otherwise."""
    return Rule(bool, by=lambda value, _: Fate(remark=why, used=value is what), note=note)


def only(kind: Any, allowed: Any, why: str, otherwise: str) -> Rule:
    """What we do anyway: any other value is an error that says the way out."""

    def by(value: Any, _: Mapping[str, Any]) -> Fate:
        if value != allowed:
            raise ConfigError(f"got {show(value)}; {otherwise}")
        return Fate(remark=f"as it is: {why}", used=True)

    return Rule(kind, by=by, note=f"{show(allowed)} only: {why}")


class Implied(NamedTuple):
    """A setting that a dialect brings along without a key of its own, unless a key has set it."""

    what: str
    path: str
    value: Any
    why: str
    when: Callable[[Draft], bool] = lambda _: True


class ForeignKey(NamedTuple):
    """One key of the file: as the table calls it, as the user wrote it, its value, and why it has no part, if so."""

    canonical: str
    shown: str
    value: Any
    inert: str = ""


@dataclass(frozen=True)
class Dialect:
    """`owns(key, value)` tells it by a key of the top level; `read(settings, role)` finds the leaves of a file."""

    name: str
    title: str
    keys: Mapping[str, Rule]
    owns: Callable[[str, Any], bool]
    read: Callable[[Mapping[str, Any], str | None], list[ForeignKey]]
    implied: tuple[Implied, ...] = ()
    sizes: tuple[str, ...] = ()  # keys that describe a model: all of them together, or there is none


def leaves(canonical: str, shown: str, value: Any, keys: Mapping[str, Rule], inert: str = "") -> list[ForeignKey]:
    """The keys of one branch of the file; a mapping is a leaf where the table has a rule for it."""
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
    return [ForeignKey(canonical, shown, value, inert)]


def refuse_role(role: str | None, title: str) -> None:
    if role is not None:
        raise ConfigError(f"role={role}: {title} describe one model; leave role out")


def unknown(canonical: str, shown: str, keys: Collection[str], what: str) -> str:
    """The same last name elsewhere comes before the nearest key of the same section."""
    return f"unknown key {shown}; the nearest one of {what} is {nearest_key(canonical, keys, siblings_first=False)}"


def show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
