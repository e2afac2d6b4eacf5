"""The rewards that are built in, and functions of files."""

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp2x.train import ConfigError
from fsdp2x.train.grpo.config import RewardSection
from fsdp2x.train.grpo.rewards import last_number, make_rewards, total_reward

HAS_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None


def score(functions, completions, clip=None, **columns):
    config = RewardSection(functions=functions, clip=clip)
    prompts = ["?"] * len(completions)
    return total_reward(make_rewards(config, "answer"), config, prompts, completions, columns)


@pytest.mark.parametrize(
    ("function", "completion", "answer", "value"),
    [
        ("exact_match", " Paris.\n", "paris", 1),
        ("exact_match", "It is Paris", "paris", 0),
        ({"name": "exact_match", "ignore_case": False}, "paris", "Paris", 0),
        ("contains", "It is Paris, of course", "paris", 1),
        ("contains", "Parisians", "paris", 0),
        ("contains", "anything", "", 0),
        ("number", "So 3 + 4 = 7.", "7", 1),
        ("number", "The total is $1,234.50", "1234.5", 1),
        ("number", "7 or 8", "7", 0),
        ("number", "none", "7", 0),
        ("number", "-3", 3, 0),
        ({"name": "number", "tolerance": 0.1}, "3.1", "3", 1),
        ({"name": "regex", "pattern": "<answer>.*</answer>"}, "<answer>\n4</answer> done", "", 1),
        ({"name": "regex", "pattern": "[0-9]+", "whole": True}, "4 apples", "", 0),
        ({"name": "length", "target": 4}, "abcde", "", 0),
        ({"name": "length", "target": 4, "slack": 4}, "abcdef", "", 0.5),
        pytest.param(
            "math_verify", "$\\frac{1}{2}$", "$0.5$", 1,
            marks=pytest.mark.skipif(not HAS_MATH_VERIFY, reason="math-verify is not installed"),
        ),
    ],
)  # fmt: skip
def test_built_in(function, completion, answer, value):
    (total,), _ = score([function], [completion], answer=[answer])
    assert total == pytest.approx(value)


@given(st.floats(-1e9, 1e9, allow_nan=False).map(lambda x: round(x, 3)), st.text("abc $,.\n", max_size=8))
def test_the_last_number_is_found_however_it_is_written(number, before):
    for shown in (f"{number:.3f}", f"{number:,.3f}", f"1 and {number:.3f}."):
        assert last_number(f"{before} {shown}") == pytest.approx(number, abs=1e-3)


def test_weights_and_clip_and_parts(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def longer(completions, prompts, answer, bonus=0, **rest):\n"
                    "    return [None if not c else len(c) + bonus for c in completions]\n")  # fmt: skip
    functions = ["exact_match", {"name": f"{file}:longer", "weight": 0.5, "bonus": 2}]
    totals, parts = score(functions, ["a", "bb", ""], answer=["a", "a", "a"])
    assert parts == {"exact_match": [1, 0, 0], "longer": [3, 4, 0]}
    assert totals == [1 + 1.5, 2, 0]
    assert score(functions, ["a", "bb", ""], clip=2.0, answer=["a", "a", "a"])[0] == [2, 2, 0]
    assert score(functions, [], answer=[]) == ([], {"exact_match": [], "longer": []})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(completions, **rest): return [1.0]", "each of 2 completions, got 1 values"),
        ("def f(completions, **rest): return [float('nan')] * 2", "expected a finite number"),
        ("def f(completions, **rest): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def g(completions, **rest): return []", r"has no function f\. It has: g\."),
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_function_that_is_wrong(tmp_path, source, message):
    file = tmp_path / "own.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        score([f"{file}:f"], ["a", "b"], answer=["a", "a"])


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "at least one reward"),
        ([3], "got 3, expected a name or a mapping"),
        ([{"name": "exact_match", "weight": "much"}], r"functions\[0\].weight: got 'much'"),
        ([{"name": "exact_match", "fold": True}], r"exact_match has no option 'fold'\. It has ignore_case"),
        (["exact_match", "exact_match"], "exact_match appears twice"),
        ([{"name": "regex", "pattern": "("}], "pattern: missing"),
    ],
)
def test_settings_that_are_refused(functions, message):
    with pytest.raises(ConfigError, match=message):
        make_rewards(RewardSection(functions=functions), "answer")


def test_a_reward_without_its_column():
    with pytest.raises(ConfigError, match="the rows have no column 'answer'. See data.answer_column"):
        score(["exact_match"], ["a"])
