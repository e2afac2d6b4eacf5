"""``rl.rollout_func``: settings of TRL that it does not support are named."""

from types import SimpleNamespace

import pytest

from fsdp2x import rl

SUPPORTED = {
    "use_vllm": False,
    "use_transformers_continuous_batching": False,
    "repetition_penalty": 1.0,
    "tools": [],
    "environment_factories": None,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_vllm", True),
        ("use_transformers_continuous_batching", True),
        ("repetition_penalty", 1.2),
        ("tools", [print]),
        ("generation_kwargs", {"num_beams": 2}),
        ("cache_implementation", "static"),
    ],
)
def test_settings_that_are_not_supported_raise(name, value):
    args = SimpleNamespace(generation_kwargs=None, cache_implementation=None)
    trainer = SimpleNamespace(**SUPPORTED, args=args)
    setattr(trainer if hasattr(trainer, name) else args, name, value)
    with pytest.raises(ValueError, match=f"rollout_func does not support {name}=.* Leave it out"):
        rl.rollout_func()(["a prompt"], trainer)


def test_an_address_must_be_one():
    with pytest.raises(ValueError, match="rollout_func: expected addresses such as"):
        rl.rollout_func("localhost:8000")
