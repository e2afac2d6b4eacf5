"""Settings in our sections as a dialect's rows build them up, and what became of each key of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import ConfigError
from ..parse import convert, expand_dotted
from .rules import Dialect, Fate, ForeignKey, Implied, show, unknown


@dataclass
class Translation:
    """A file in our sections, with what became of each key and what is missing before it can run."""

    dialect: str
    settings: dict
    fates: list[Fate] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)

    def without_effect(self) -> list[str]:
        """One sentence per reason, with all keys that it holds for."""
        by_reason: dict[str, list[str]] = {}
        for fate in self.fates:
            if not fate.has_effect:
                by_reason.setdefault(fate.remark, []).append(fate.key)
        return [f"no effect: {', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]


@dataclass
class Draft:
    ours: Mapping[str, Any]  # what the command line adds in our sections
    settings: dict[str, Any] = field(default_factory=dict)  # by dotted path
    given: dict[str, Any] = field(default_factory=dict)  # what the file says, by canonical key
    fates: list[Fate] = field(default_factory=list)
    _set_by: dict[str, str] = field(default_factory=dict)

    def write(self, fate: Fate) -> None:
        """Sets what a key became; another key of the file that set it to something else is an error."""
        for path, value in fate.became.items():
            if path in self._set_by and self.settings[path] != value:
                raise ConfigError(
                    f"{fate.key}: it means {path}={show(value)}, but {self._set_by[path]} means {path}="
                    f"{show(self.settings[path])}; leave one of them out"
                )
            self.settings[path], self._set_by[path] = value, fate.key
        self.fates.append(fate)


def evaluates(draft: Draft) -> bool:
    return draft.settings.get("train.mode") == "evaluate"


ALL_TEXT = Implied("(mode)", "data.held_out", 0.0, "the loss is that of all text", evaluates)


def check_keys(leaves: list[ForeignKey], dialect: Dialect) -> None:
    for leaf in leaves:
        if leaf.canonical not in dialect.keys:
            raise ConfigError(unknown(leaf.canonical, leaf.shown, dialect.keys, dialect.title))


def draw_up(leaves: list[ForeignKey], dialect: Dialect, ours: Mapping[str, Any]) -> Translation:
    """All values are checked before any row acts, so that rows may look at other keys of the file."""
    draft = Draft(ours)
    checked = [
        leaf._replace(value=convert(dialect.keys[leaf.canonical].kind, leaf.value, leaf.shown)) for leaf in leaves
    ]
    draft.given = {leaf.canonical: leaf.value for leaf in checked if not leaf.inert}
    for canonical, shown, value, inert in checked:
        if inert:
            draft.write(Fate(remark=inert, key=shown, value=value))
        else:
            draft.write(dialect.keys[canonical].fate(shown, value, draft.given))
    needs = _complete_model(draft, dialect.sizes)
    for implied in dialect.implied:
        if implied.when(draft) and draft.settings.get(implied.path) is None:
            draft.write(Fate({implied.path: implied.value}, implied.why, key=implied.what))
    return Translation(dialect.name, expand_dotted(draft.settings), draft.fates, needs)


def _complete_model(draft: Draft, sizes: tuple[str, ...]) -> list[str]:
    """Which sizes are missing. Single settings of a model that is not there would hide that it is missing."""
    missing = [key for key in sizes if key not in draft.given]
    if len(missing) < len(sizes):
        return [f"{', '.join(missing)}: the model's size"] if missing else []
    if sizes:
        draft.settings = {path: value for path, value in draft.settings.items() if not path.startswith("model.")}
    return []
