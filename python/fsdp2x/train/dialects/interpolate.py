"""References inside a file: `${models.policy_trainer.num_gpu}` stands for the value of that key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..config import ConfigError

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_DEPTH = 20
MOST_REFERENCES = 10_000
_MOST_CHARACTERS = 1 << 20


def interpolate(settings: Mapping) -> dict:
    """A copy without references. A value that is one reference keeps the type; inside other text it becomes text.

    Raises:
        ConfigError: a key that is not there, a reference to a mapping, references in a circle or more than
            `MOST_REFERENCES`, each counted as often as it is followed, or `${name:...}`, which would be computed.
    """
    resolver = _Resolver(settings)
    return {key: resolver.resolve(value, str(key), 0) for key, value in settings.items()}


class _Resolver:
    """Follows references in `root`; references to what has references may make much of little."""

    def __init__(self, root: Mapping):
        self._root, self._num_followed = root, 0

    def resolve(self, value: Any, key: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ConfigError(f"{key}: its references lead in a circle")
        if isinstance(value, Mapping):
            return {name: self.resolve(inner, f"{key}.{name}", depth) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.resolve(inner, f"{key}[{index}]", depth) for index, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = REFERENCE.fullmatch(value.strip())
        if whole is not None:
            return self._follow(whole[1], key, depth)
        text = REFERENCE.sub(lambda found: str(self._follow(found[1], key, depth)), value)
        if "${" in text:
            raise ConfigError(f"{key}: {value!r} is no reference of the form ${{section.key}}")
        return text

    def _follow(self, path: str, key: str, depth: int) -> Any:
        self._num_followed += 1
        found = self.resolve(_look_up(path, self._root, key), key, depth + 1)
        if self._num_followed > MOST_REFERENCES or (isinstance(found, str) and len(found) > _MOST_CHARACTERS):
            raise ConfigError(f"{key}: its references lead to more references, or to more text, than any config needs")
        return found


def _look_up(path: str, root: Mapping, key: str) -> Any:
    if ":" in path:
        raise ConfigError(f"{key}: ${{{path}}} would have to be computed; write its value")
    value: Any = root
    for part in path.strip().split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(f"{key}: ${{{path}}} refers to a key that is not in the file")
        value = value[part]
    if isinstance(value, Mapping):
        raise ConfigError(f"{key}: ${{{path}}} refers to a section, expected a single value")
    return value
