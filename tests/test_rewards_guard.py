"""Reward functions that misbehave are named, and rows without a reward leave their group alone."""

import asyncio
import functools
import math
import types
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from test_trainer_step import make, rows_of

from grpo_ext.training.rewards import checked_reward

EPS = 1e-6  # added to the standard deviation
TOLERANCE = 1e-6


def call(function, completions=4):
    """The function's rewards through the guard, as TRL calls it."""
    guarded = checked_reward(function, "mine")
    result = guarded(prompts=["p"] * completions, completions=["c"] * completions, completion_ids=[[7]] * completions)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def returns(value):
    def mine(completions, **kwargs):
        return value

    return mine


@pytest.mark.parametrize(
    "value",
    [
        [1.0, 0.0, 1.0, 0.0],
        (1, 0, 1, 0),
        [True, False, True, False],
        [Fraction(2, 2), Fraction(0), 1, 0],
        np.array([1.0, 0.0, 1.0, 0.0]),
        np.array([True, False, True, False]),
        [np.float32(1), np.int64(0), np.bool_(True), np.array(0.0)],
        torch.tensor([1.0, 0.0, 1.0, 0.0]),
        torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0), torch.tensor(0), torch.tensor([1.0]), torch.tensor(False)],
        pd.Series([1, 0, 1, 0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_counts_as_rewards(value):
    rewards = call(returns(value))
    assert rewards == [1.0, 0.0, 1.0, 0.0] and all(type(reward) is float for reward in rewards)


def test_none_and_nan_are_no_reward():
    assert call(returns([1, None, float("nan"), np.float64("nan")])) == [1.0, None, None, None]
    assert call(returns(torch.tensor([1.0, torch.nan, 2.0, torch.nan]))) == [1.0, None, 2.0, None]


async def in_time(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


async def too_few(completions, **kwargs):
    return [0.5]


async def broken(completions, **kwargs):
    raise KeyError("answer")


class Judge:
    """A callable object, as those with a state are."""

    async def __call__(self, completions, **kwargs):
        return [float("inf")] * len(completions)


def test_async_functions_are_guarded_alike():
    assert call(in_time) == [0.5] * 4
    with pytest.raises(ValueError, match="'mine' returned 1 rewards for 4 completions"):
        call(too_few)
    with pytest.raises(RuntimeError, match="'mine' raised KeyError: 'answer'"):
        call(functools.partial(broken))
    with pytest.raises(ValueError, match="'mine' returned inf for completion 0"):
        call(Judge())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "returned a NoneType; it must return a list with one number"),
        (0.5, "returned a float; it must return a list"),
        ("1.0", "returned a str; it must return a list"),
        ("1010", "returned a str; it must return a list"),
        ({0: 1.0}, "returned a dict; it must return a list"),
        ((x for x in [1.0] * 4), "returned a generator; it must return a list"),
        (np.array(1.0), "returned a float; it must return a list"),
        (torch.tensor(1.0), "returned a float; it must return a list"),
        ([], "returned 0 rewards for 4 completions; it must return one per completion"),
        ([1.0] * 3, "returned 3 rewards for 4 completions"),
        ([1.0] * 5, "returned 5 rewards for 4 completions"),
        ([1.0, "0.5", 1.0, 1.0], r"returned '0.5' \(str\) for completion 1; it must return a number, or None"),
        ([1.0, 1.0, [1.0], 1.0], r"returned \[1.0\] \(list\) for completion 2"),
        ([1.0, 1.0, 1.0, 1j], r"returned 1j \(complex\) for completion 3"),
        ([torch.ones(2)] * 4, r"returned tensor\(\[1., 1.\]\) \(Tensor\) for completion 0"),
        (np.ones((4, 1)), r"returned \[1.0\] \(list\) for completion 0"),
        ([1.0, float("inf"), 1.0, 1.0], "returned inf for completion 1; a reward must be finite, or None"),
        ([-math.inf] * 4, "returned -inf for completion 0"),
        ([10**400] * 4, "returned inf for completion 0"),
        (np.array([0, 1, 2, np.inf]), "returned inf for completion 3"),
        (torch.tensor([0, -torch.inf, 2, 3]), "returned -inf for completion 1"),
    ],
    ids=lambda value: str(type(value).__name__) if not isinstance(value, str) else value[:20],
)
def test_what_does_not(value, said):
    with pytest.raises(ValueError, match=f"^reward function 'mine' {said}"):
        call(returns(value))


def test_an_exception_keeps_its_cause():
    def mine(completions, **kwargs):
        return [1 / 0]

    with pytest.raises(
        RuntimeError, match="reward function 'mine' raised ZeroDivisionError: division by zero"
    ) as caught:
        call(mine)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# In the trainer


def crashing_reward(completions, **kwargs):
    raise KeyError("answer")


async def crashing_judge(completions, **kwargs):
    raise TimeoutError("no answer in 10 s")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (crashing_reward, "reward function 'crashing_reward' raised KeyError: 'answer'"),
        (crashing_judge, "reward function 'crashing_judge' raised TimeoutError: no answer in 10 s"),
    ],
)
def test_a_run_ends_with_the_functions_name(tmp_path, function, said):
    trainer = make(tmp_path, reward=[tiny.length_reward, function])
    with pytest.raises(RuntimeError, match=said):
        trainer.train()


def test_a_reward_model_that_is_infinite_is_named(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, input_ids, **kwargs):
            return types.SimpleNamespace(logits=torch.full((len(input_ids), 1), torch.inf))

    trainer = make(tmp_path)
    trainer.reward_funcs, trainer.reward_processing_classes = [Model()], [tiny.tokenizer()]
    with pytest.raises(ValueError, match="reward 'length_reward' is infinite at step 0; it must be finite"):
        trainer.train()


def fixed(name, rewards):
    """A reward function that gives these rewards to the responses of a generation batch, in order."""

    def function(completions, **kwargs):
        assert len(completions) == len(rewards)
        return rewards

    function.__name__ = name
    return function


def advantages_of(trainer) -> list[float]:
    """The last generation's, as logged; the rows that were trained on had the same."""
    logged = list(trainer._logs["advantages"])
    assert sorted(row["advantage"] for row in rows_of(trainer)) == pytest.approx(sorted(logged))
    return logged


def test_rows_without_a_reward_are_left_out_of_their_group(tmp_path, caplog):
    """1 and 3: mean 2, std sqrt(2). 1, 2, 3, 6: mean 3, std sqrt((4 + 1 + 0 + 9) / 3)."""
    trainer = make(tmp_path, reward=fixed("some", [1.0, None, 3.0, float("nan"), 1.0, 2.0, 3.0, 6.0]))
    trainer.train()
    half, whole = 1 / (math.sqrt(2) + EPS), math.sqrt(14 / 3) + EPS
    expected = [-half, 0.0, half, 0.0, -2 / whole, -1 / whole, 0.0, 3 / whole]
    assert advantages_of(trainer) == pytest.approx(expected, rel=TOLERANCE)
    (said,) = [r.getMessage() for r in caplog.records if "gave no reward" in r.getMessage()]
    assert "reward function 'some' gave no reward (None or NaN) for 2 of 8 completions" in said
    assert trainer.state.log_history[0]["reward"] == pytest.approx((1 + 3 + 1 + 2 + 3 + 6) / 6)
    assert math.isfinite(trainer.state.log_history[0]["loss"])


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_group_with_one_reward_or_none_has_nothing_to_compare(tmp_path, missing):
    trainer = make(tmp_path, reward=fixed("few", [missing] * 4 + [missing, 5.0, missing, missing]))
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert advantages_of(trainer) == [0.0] * 8
    assert all(torch.equal(a, b) for a, b in zip(start, trainer.model.parameters(), strict=True))


def test_several_functions_with_weights(tmp_path):
    """The sum over those that score a row. First group: 1, 2 + 4/2, 3, 4 + 0/2 = 1, 4, 3, 4: mean 3, std sqrt(6 / 3).

    Second group: 0, -, 2 - 2/2, 4/2 = 0, -, 1, 2: mean 1, std 1.
    """
    first = fixed("first", [1.0, 2.0, 3.0, 4.0, 0.0, None, 2.0, None])
    second = fixed("second", [None, 4.0, None, 0.0, None, float("nan"), -2.0, 4.0])
    trainer = make(tmp_path, reward=[first, second], reward_weights=[1.0, 0.5])
    trainer.train()
    std = math.sqrt(2) + EPS
    expected = [-2 / std, 1 / std, 0.0, 1 / std, -1 / (1 + EPS), 0.0, 0.0, 1 / (1 + EPS)]
    assert advantages_of(trainer) == pytest.approx(expected, rel=TOLERANCE)


def test_the_completions_table_holds_the_advantages_in_force(tmp_path):
    """Without the division by the std, which TRL would do; in its parquet file as well."""
    rewards = [1.0, 2.0, 3.0, 6.0, 0.0, 0.0, None, 3.0]
    trainer = make(
        tmp_path,
        reward=fixed("table", rewards),
        norm_adv_by_std_in_grpo=False,
        log_completions=True,
        num_completions_to_print=1,
    )
    trainer.train()
    expected = [-2.0, -1.0, 0.0, 3.0, -1.0, -1.0, 0.0, 2.0]
    assert advantages_of(trainer) == pytest.approx(expected, rel=TOLERANCE)
    (path,) = (tmp_path / "completions").glob("*.parquet")
    table = pd.read_parquet(path)
    assert table["advantage"].tolist() == pytest.approx(expected, rel=TOLERANCE)
    assert table["table"].tolist() == pytest.approx([*rewards[:6], float("nan"), 3.0], nan_ok=True)


def test_an_evaluation_logs_its_own_advantages(tmp_path):
    trainer = make(tmp_path, eval_dataset=tiny.prompts(2), per_device_eval_batch_size=8)
    trainer.reward_funcs[0] = checked_reward(fixed("eval", [1.0, 2.0, 3.0, 6.0, 0.0, 0.0, None, 3.0]), "eval")
    trainer.evaluate()
    whole = math.sqrt(14 / 3) + EPS
    # 0, 0, 3: mean 1, std sqrt((1 + 1 + 4) / 2)
    rest = math.sqrt(3) + EPS
    expected = [-2 / whole, -1 / whole, 0.0, 3 / whole, -1 / rest, -1 / rest, 0.0, 2 / rest]
    assert list(trainer._logs["advantages"]) == pytest.approx(expected, rel=TOLERANCE)
