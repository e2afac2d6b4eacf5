"""References inside a file: `${models.policy_trainer.num_gpu}` stands for the value of that key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..config import ConfigError

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_DEPTH = 20


def interpolate(settings: Mapping) -> dict:
    """A copy without references. A value that is one reference keeps the type; inside other text it becomes text.

    Raises:
        ConfigError: a key that is not there, a reference to a mapping, references in a circle, or `${name:...}`,
            which would be computed.
    """
    return {key: _resolve(value, settings, str(key), 0) for key, value in settings.items()}


def _resolve(value: Any, root: Mapping, key: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{key}: its references lead in a circle")
    if isinstance(value, Mapping):
        return {name: _resolve(inner, root, f"{key}.{name}", depth) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolve(inner, root, f"{key}[{index}]", depth) for index, inner in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = REFERENCE.fullmatch(value.strip())
    if whole is not None:
        return _resolve(_look_up(whole[1], root, key), root, key, depth + 1)
    text = REFERENCE.sub(lambda found: str(_resolve(_look_up(found[1], root, key), root, key, depth + 1)), value)
    if "${" in text:
        raise ConfigError(f"{key}: {value!r} is no reference of the form ${{section.key}}")
    return text


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
