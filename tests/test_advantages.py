"""From rewards to advantages: every estimator against verl's numbers and by hand, KL in the reward, overlong penalty.

Groups are equal-sized here and uneven in many recordings. Estimators that look at one group at a time are compared
group by group. For those that look at the whole batch the missing rows have no reward, which leaves them out of every
statistic, and a group of one gets companions without a token that make its mean 0 and its std 1: what verl takes there.
"""

import dataclasses
import math

import pytest
import torch
from goldens_io import FLOAT32, FLOAT64, cases, tensor

from grpo_ext.objective import KL_PENALTIES, Metric
from grpo_ext.objective.advantages import (
    ADV_ESTIMATORS,
    AdvantageConfig,
    ScoredResponses,
    adv_traits,
    compute_advantages,
    grpo_advantage,
    on_last_token,
    register_adv_est,
)
from grpo_ext.objective.reward_shaping import (
    AdaptiveKLController,
    FixedKLController,
    KLControl,
    kl_in_reward,
    overlong_penalty,
)

NAN = math.nan
TOL = {"rel": 1e-12, "abs": 1e-12}
NAMES = tuple(ADV_ESTIMATORS)
PER_TOKEN = ("reinforce_plus_plus", "remax")
COMPARE = tuple(name for name in NAMES if name not in PER_TOKEN)  # the responses of a group with each other


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected, tolerance=FLOAT64):
    torch.testing.assert_close(actual.to(torch.float64), expected, **tolerance)


def estimate(rewards, estimator, num_generations, mask=None, *, settings=None, **given):
    """Advantages as `(N,)` or `(N, T)`; without a mask, one token per response."""
    mask = torch.ones(len(rewards), 1) if mask is None else mask
    responses = ScoredResponses(rewards, mask, num_generations, **given)
    return compute_advantages(responses, AdvantageConfig(estimator, **(settings or {})))


# Equality with verl


def recorded(*estimators):
    """The cases of these estimators, except for noise that is exactly 0 here (README, departure 5)."""
    return [
        pytest.param(case, id=case["name"])
        for case in cases("advantages")
        if case["settings"]["adv_estimator"] in estimators and "float_noise" not in case["name"]
    ]


def recorded_tensors(case):
    """Outcomes, mask, advantages and the settings that are ours."""
    inputs = case["inputs"]
    known = ("norm_adv_by_std_in_grpo", "gamma")
    settings = {name: value for name, value in case["settings"].items() if name in known}
    mask = tensor(inputs["response_mask"]).bool()
    return tensor(inputs["token_level_rewards"]).sum(-1), mask, tensor(case["outputs"]["advantages"]), settings


def rows_of_groups(case):
    index = case["inputs"]["index"]
    return [[row for row, name in enumerate(index) if name == group] for group in dict.fromkeys(index)]


def in_order_of_groups(case):
    return [row for rows in rows_of_groups(case) for row in rows]


def tolerance_of(case):
    settings = case["settings"]
    if settings["dtype"] == "float32":
        return {"rtol": 2e-6, "atol": 2e-6}
    # the std of a group of one, and the factor of gpg, are float32 there
    singles = any(len(rows) == 1 for rows in rows_of_groups(case))
    rounded = settings["adv_estimator"] == "gpg" or (settings["adv_estimator"] in ("grpo", "gdpo") and singles)
    return {"rtol": 1e-7, "atol": 1e-7} if rounded else FLOAT64


@pytest.mark.parametrize("case", recorded("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo"))
def test_estimators_of_one_group_equal_verl(case):
    rewards, mask, expected, settings = recorded_tensors(case)
    estimator = case["settings"]["adv_estimator"]
    for rows in rows_of_groups(case):
        if estimator == "rloo_vectorized" and len(rows) == 1:
            continue  # 0 there, the reward in `rloo`, and here
        name = estimator.removesuffix("_vectorized")
        advantages = estimate(rewards[rows], name, len(rows), mask[rows], settings=settings)
        close(advantages[:, None] * mask[rows], expected[rows], tolerance_of(case))


@pytest.mark.parametrize("case", recorded("gpg"))
def test_gpg_equals_verl(case):
    """Group by group, with `alpha = rows / nonzero rewards` of the batch in place of the group's own."""
    rewards, mask, expected, _ = recorded_tensors(case)
    alpha = len(rewards) / rewards.count_nonzero()
    for rows in rows_of_groups(case):
        own_alpha = len(rows) / rewards[rows].count_nonzero()
        advantages = estimate(rewards[rows], "gpg", len(rows), mask[rows]) / own_alpha * alpha
        close(advantages[:, None] * mask[rows], expected[rows], tolerance_of(case))
    if len({len(rows) for rows in rows_of_groups(case)}) == 1:
        order = in_order_of_groups(case)
        advantages = estimate(rewards[order], "gpg", len(rows), mask[order])
        close(advantages[:, None] * mask[order], expected[order], tolerance_of(case))


SIZE = 4  # of the largest group


def companions(reward: float) -> list[float]:
    """Three rewards that, with this one, have mean 0 and unbiased std 1: x + y = -r, x² + y² = 3 - r²."""
    root = math.sqrt(6 - 3 * reward**2)
    return [(-reward + root) / 2, (-reward - root) / 2, 0.0]


def filled(case, values: torch.Tensor) -> torch.Tensor:
    """Rewards `(N,)` in groups of `SIZE`."""
    out = []
    for rows in rows_of_groups(case):
        own = values[rows].tolist()
        out += own + (companions(own[0]) if len(own) == 1 else [NAN] * (SIZE - len(own)))
    return f64(out)


@pytest.mark.parametrize("case", recorded("reinforce_plus_plus_baseline", "gdpo"))
def test_whitened_outcomes_equal_verl(case):
    rewards, mask, expected, settings = recorded_tensors(case)
    parts = case["inputs"].get("reward_parts")
    weights = case["settings"].get("gdpo_reward_weights")
    groups = rows_of_groups(case)
    place = [SIZE * number + copy for number, rows in enumerate(groups) for copy in range(len(rows))]
    order = in_order_of_groups(case)
    wide_mask = torch.zeros(SIZE * len(groups), mask.shape[1])
    wide_mask[place] = mask[order].float()
    advantages = estimate(
        filled(case, rewards if parts is None else torch.zeros(len(rewards))),
        case["settings"]["adv_estimator"],
        SIZE,
        wide_mask,
        settings=settings,
        rewards_per_func=None if parts is None else torch.stack([filled(case, f64(p)) for p in parts.values()], 1),
        reward_weights=None if weights is None else f64(weights),
    )
    close(advantages[place][:, None] * mask[order], expected[order], tolerance_of(case))


@pytest.mark.parametrize("case", recorded("reinforce_plus_plus", "remax"))
@pytest.mark.parametrize("dense", [True, False])
def test_estimators_per_token_equal_verl(case, dense):
    """A mask with holes; remax is not 0 in them there. The outcome on the last valid token is what None means."""
    rewards, mask, expected, settings = recorded_tensors(case)
    tokens = tensor(case["inputs"]["token_level_rewards"])
    if not dense:
        if "dense" in case["name"]:
            pytest.skip("rewards of several tokens")
        tokens = None
    baselines = tensor(case["inputs"].get("reward_baselines"))
    name = case["settings"]["adv_estimator"]
    given = {"token_level_rewards": tokens, "reward_baselines": baselines}
    close(estimate(rewards, name, 1, mask, settings=settings, **given), torch.where(mask, expected, 0.0))


@pytest.mark.parametrize("case", [c for c in cases("advantages") if "float_noise" in c["name"]])
def test_the_recorded_noise_of_equal_rewards_is_zero(case):
    rewards, mask, _, settings = recorded_tensors(case)
    for dtype in (torch.float32, torch.float64):
        assert not estimate(rewards.to(dtype), "grpo", 8, mask, settings=settings).any()


# By hand: two groups of three, lengths 1 2 1 and 2 1 1 of two tokens

REWARDS = f64([1.0, 0.0, 2.0, 3.0, 3.0, 0.0])
LENGTHS = torch.tensor([1, 2, 1, 2, 1, 1])
MASK = (torch.arange(2) < LENGTHS[:, None]).long()


def by_hand(estimator, **settings):
    return estimate(REWARDS, estimator, 3, MASK, settings=settings).tolist()


def test_grpo():
    # means 1 and 2; squares 0 1 1 -> std 1; 1 1 4 -> std sqrt(6 / 2)
    one, root = 1 + 1e-6, math.sqrt(3) + 1e-6
    assert by_hand("grpo") == pytest.approx([0, -1 / one, 1 / one, 1 / root, 1 / root, -2 / root], **TOL)
    assert by_hand("grpo", norm_adv_by_std_in_grpo=False) == pytest.approx([0, -1, 1, 1, 1, -2], **TOL)


def test_grpo_passk():
    # best minus second: 2 - 1 over std 1; 3 - 3
    assert by_hand("grpo_passk") == pytest.approx([0, 0, 1 / (1 + 1e-6), 0, 0, 0], **TOL)
    assert by_hand("grpo_passk", norm_adv_by_std_in_grpo=False) == [0, 0, 1, 0, 0, 0]


def test_rloo():
    # against the others' means: 1 - (0 + 2)/2, 0 - (1 + 2)/2, 2 - (1 + 0)/2; 3 - 1.5, 3 - 1.5, 0 - 3
    assert by_hand("rloo") == pytest.approx([0, -1.5, 1.5, 1.5, 1.5, -3], **TOL)


def test_opo():
    # by tokens: (1*1 + 2*0 + 1*2) / 4 = 0.75; (2*3 + 1*3 + 1*0) / 4 = 2.25
    assert by_hand("opo") == pytest.approx([0.25, -0.75, 1.25, 0.75, 0.75, -2.25], **TOL)


def test_gpg():
    # 6 rows, 4 of them not 0: alpha 1.5 times 0 -1 1, 1 1 -2
    assert by_hand("gpg") == pytest.approx([0, -1.5, 1.5, 1.5, 1.5, -3], **TOL)


def test_reinforce_plus_plus_baseline():
    # 0 -1 1, 1 1 -2 on 1 2 1, 2 1 1 tokens: sum 0 - 2 + 1 + 2 + 1 - 2 = 0; squares 0 + 2 + 1 + 2 + 1 + 4 = 10 over 7
    scale = 1 / math.sqrt(10 / 7 + 1e-8)
    expected = [0, -scale, scale, scale, scale, -2 * scale]
    assert by_hand("reinforce_plus_plus_baseline") == pytest.approx(expected, **TOL)
    # one more token for the 2: mean 1/9, squares 11 - 9/81 = 98/9 over 8
    longer = MASK.clone()
    longer[2, 1] = 1
    scale = 1 / math.sqrt(98 / 72 + 1e-8)
    expected = [(x - 1 / 9) * scale for x in (0, -1, 1, 1, 1, -2)]
    actual = estimate(REWARDS, "reinforce_plus_plus_baseline", 3, longer).tolist()
    assert actual == pytest.approx(expected, **TOL)


def test_gdpo():
    # parts 1 0 2 | 3 3 0 (centred 0 -1 1 | 1 1 -2) and 0 0 3 | 5 5 5 (centred -1 -1 2 | 0): with weights 1 and 2
    # -2 -3 5 | 1 1 -2; tokens 1 2 1, 2 1 1: sum -2 - 6 + 5 + 2 + 1 - 2 = -2, mean -0.25
    # squares 4 + 18 + 25 + 2 + 1 + 4 = 54, minus 8/16: 53.5 over 7
    parts = torch.stack([REWARDS, f64([0, 0, 3, 5, 5, 5])], 1)
    actual = estimate(
        REWARDS,
        "gdpo",
        3,
        MASK,
        settings={"norm_adv_by_std_in_grpo": False},
        rewards_per_func=parts,
        reward_weights=f64([1, 2]),
    )
    scale = 1 / math.sqrt(53.5 / 7 + 1e-8)
    expected = [(x + 0.25) * scale for x in (-2, -3, 5, 1, 1, -2)]
    assert actual.tolist() == pytest.approx(expected, **TOL)


def test_gdpo_normalises_each_part_on_its_own():
    # one part a thousand times the other: each has std 1 after the group's, so both count alike
    parts = f64([[1000.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    a, b, _ = estimate(parts.sum(1), "gdpo", 3, rewards_per_func=parts).tolist()
    assert a == pytest.approx(b, rel=1e-5) and a > 0  # the eps is 2e-6 of the smaller std


HOLE = torch.tensor([[1, 0, 1], [1, 1, 0]])
TOKENS = f64([[0.5, 9.0, 2.0], [0.0, 1.0, 9.0]])


def test_reinforce_plus_plus():
    # gamma 0.5, the hole neither pays nor discounts: 0.5 + 0.5 * 2 = 1.5, 2; 0 + 0.5 * 1 = 0.5, 1
    # mean 5/4, squares 1/16 + 9/16 + 9/16 + 1/16 = 5/4 over 3
    scale = 1 / math.sqrt(5 / 12 + 1e-8)
    expected = [0.25 * scale, 0, 0.75 * scale, -0.75 * scale, -0.25 * scale, 0]
    actual = estimate(
        TOKENS.sum(1), "reinforce_plus_plus", 1, HOLE, settings={"gamma": 0.5}, token_level_rewards=TOKENS
    )
    assert actual.view(-1).tolist() == pytest.approx(expected, **TOL)


def test_the_discount_over_a_long_row():
    # one reward of 1 at the end of 100 tokens: 0.9^99 ... 1; the other row's are 0
    mask = torch.ones(2, 100)
    actual = estimate(f64([1.0, 0.0]), "reinforce_plus_plus", 1, mask, settings={"gamma": 0.9})
    powers = 0.9 ** torch.arange(99, -1, -1, dtype=torch.float64)
    returns = torch.stack([powers, torch.zeros_like(powers)])
    close(actual, (returns - returns.mean()) / (returns.var() + 1e-8).sqrt())


def test_remax():
    # sums from each token on, without a discount and without the hole: 2.5, 2; 1, 1; minus 0.5 and 2
    actual = estimate(
        TOKENS.sum(1), "remax", 1, HOLE, token_level_rewards=TOKENS, reward_baselines=f64([0.5, 2.0])
    ).tolist()
    assert actual == [[2.0, 0.0, 1.5], [-1.0, -1.0, 0.0]]
    # the outcome 11.5 on the last valid token; a row without a baseline has nothing to be compared with
    outcome = estimate(TOKENS.sum(1), "remax", 1, HOLE, reward_baselines=f64([0.5, NAN])).tolist()
    assert outcome == [[11.0, 0.0, 11.0], [0.0, 0.0, 0.0]]


def test_the_outcome_on_the_last_valid_token():
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    actual = on_last_token(f64([3.0, 5.0, 7.0]), mask).tolist()
    assert actual == [[0, 0, 0, 3, 0], [0] * 5, [0, 0, 0, 0, 7]]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [2 / (1 + 1e-6), -1 / (1 + 1e-6)]),
        ("rloo", [2, -1]),
        ("opo", [2, -1]),
        ("gpg", [2, -1]),  # neither is 0: alpha 1
        ("reinforce_plus_plus_baseline", [1.5 / math.sqrt(4.5 + 1e-8), -1.5 / math.sqrt(4.5 + 1e-8)]),
    ],
)
def test_a_group_of_one_keeps_its_reward(estimator, expected):
    assert estimate(f64([2.0, -1.0]), estimator, 1).tolist() == pytest.approx(expected, **TOL)


# What must not matter does not


def scored(seed=0, dtype=torch.float64) -> ScoredResponses:
    """Three groups of four: uneven rewards, a missing one, equal ones; a hole, a wholly masked row."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    mask = (torch.arange(7) < torch.tensor([7, 3, 5, 0, 6, 2, 7, 4, 1, 3, 7, 5])[:, None]).long()
    mask[0, 2] = 0
    rewards = normal(12)
    rewards[8:] = 0.7
    rewards[5] = NAN
    parts = normal(12, 2)
    parts[2, 0] = NAN
    return ScoredResponses(
        rewards,
        mask,
        4,
        token_level_rewards=normal(12, 7),
        rewards_per_func=parts,
        reward_weights=torch.tensor([1.0, 0.5], dtype=dtype),
        reward_baselines=normal(12),
    )


def advantages_of(responses, estimator, **settings) -> torch.Tensor:
    return compute_advantages(responses, AdvantageConfig(estimator, **settings))


def per_token(advantages, responses):
    mask = responses.response_mask.bool()
    return torch.where(mask, advantages.view(len(mask), -1), 0.0)


@pytest.mark.parametrize("estimator", NAMES)
@pytest.mark.parametrize("garbage", [1e4, NAN, math.inf])
def test_garbage_outside_the_mask_reaches_nothing(estimator, garbage):
    clean = scored()
    tokens = torch.where(clean.response_mask.bool(), clean.token_level_rewards, garbage)
    tokens[5] = garbage  # the row without a reward
    dirty = dataclasses.replace(clean, token_level_rewards=tokens)
    actual, expected = advantages_of(dirty, estimator), advantages_of(clean, estimator)
    assert torch.isfinite(actual).all() and expected.any()
    assert torch.equal(actual, expected)
    assert not actual[5].any()
    if adv_traits(estimator).per_token:
        assert not actual[~clean.response_mask.bool()].any()


@pytest.mark.parametrize("estimator", NAMES)
def test_order_inside_a_group_and_order_of_groups_do_not_matter(estimator):
    rows = scored()
    order = torch.tensor([11, 8, 10, 9, 2, 0, 3, 1, 5, 7, 4, 6])
    fields = {
        name: value[order]
        for name in ("rewards", "response_mask", "token_level_rewards", "rewards_per_func", "reward_baselines")
        if (value := getattr(rows, name)) is not None
    }
    moved = dataclasses.replace(rows, **fields)
    close(advantages_of(moved, estimator), advantages_of(rows, estimator)[order])


@pytest.mark.parametrize("estimator", COMPARE)
def test_a_row_without_a_reward_is_as_if_it_were_not_there(estimator):
    rewards = f64([1.0, NAN, 0.0, 2.0, 3.0, 0.5, NAN, 0.25])
    mask = (torch.arange(3) < torch.tensor([1, 3, 2, 3, 1, 2, 3, 2])[:, None]).long()
    kept = ~rewards.isnan()
    actual = estimate(rewards, estimator, 4, mask)
    assert actual[~kept].tolist() == [0, 0]
    close(actual[kept], estimate(rewards[kept], estimator, 3, mask[kept]))


@pytest.mark.parametrize("estimator", PER_TOKEN)
def test_a_row_without_a_reward_is_as_if_it_were_not_there_per_token(estimator):
    rows = scored()
    kept = ~rows.rewards.isnan()
    fewer = ScoredResponses(
        rows.rewards[kept],
        rows.response_mask[kept],
        1,
        rows.token_level_rewards[kept],
        reward_baselines=rows.reward_baselines[kept],
    )
    close(advantages_of(rows, estimator)[kept], advantages_of(fewer, estimator))


@pytest.mark.parametrize("estimator", COMPARE)
def test_a_lone_scored_row_of_a_group_counts_as_none(estimator):
    rewards = f64([1.0, 0.0, 0.5, NAN, 9.0, NAN])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1], [1, 0]])
    actual = estimate(rewards, estimator, 3, mask)
    assert actual[3:].tolist() == [0, 0, 0]
    close(actual[:3], estimate(rewards[:3], estimator, 3, mask[:3]))


def test_gdpo_leaves_a_missing_part_out():
    # the second part is there for two rows: 4 and 2 are centred to 1 and -1; the third row has only its first part
    parts = f64([[0.0, 4.0], [3.0, 2.0], [0.0, NAN], [0.0, NAN], [5.0, NAN], [NAN, 7.0]])
    actual = estimate(
        parts.nansum(1), "gdpo", 3, settings={"norm_adv_by_std_in_grpo": False}, rewards_per_func=parts
    ).tolist()
    # group 1: -1 + 1, 2 - 1, -1; group 2: -2.5, 2.5, and the last row has nobody to compare with in its only part
    expected = f64([0.0, 1.0, -1.0, -2.5, 2.5])
    expected = (expected / (expected.var() + 1e-8).sqrt()).tolist()
    assert actual == pytest.approx([*expected, 0.0], **TOL)


@pytest.mark.parametrize("estimator", COMPARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_are_exactly_zero(estimator, dtype):
    # (0.7 + ... + 0.7) / 6 is 0.7 - 1e-16 in float64, by length too
    lengths = torch.tensor([5, 3, 7, 1, 2, 6])
    mask = (torch.arange(7) < lengths[:, None]).long()
    assert not estimate(torch.full((6,), 0.7, dtype=dtype), estimator, 6, mask).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_returns_are_whitened_to_exactly_zero(dtype):
    # 28 returns of 0.7, whose mean is not 0.7 in float64
    mask = torch.ones(4, 7)
    assert not estimate(torch.full((4,), 0.7, dtype=dtype), "reinforce_plus_plus", 4, mask).any()


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
@pytest.mark.parametrize("tokens", [[[1, 0], [0, 0]], [[0, 0], [0, 0]], [[], []]])
def test_whitening_fewer_than_two_tokens_is_zero(estimator, tokens):
    actual = estimate(f64([1.0, 0.0]), estimator, 2, torch.tensor(tokens))
    assert torch.isfinite(actual).all() and not actual.any()


@pytest.mark.parametrize("estimator", NAMES)
@pytest.mark.parametrize("all_missing", [True, False])
def test_nothing_to_learn_from_is_zero_and_finite(estimator, all_missing):
    rows = scored()
    if all_missing:
        empty = dataclasses.replace(rows, rewards=torch.full((12,), NAN))
        assert not advantages_of(empty, estimator).any()
    empty = dataclasses.replace(rows, response_mask=torch.zeros(12, 7))
    actual = advantages_of(empty, estimator)
    assert torch.isfinite(actual).all() and not per_token(actual, empty).any()


@pytest.mark.parametrize("estimator", NAMES)
def test_float32_is_computed_in_float64(estimator):
    rows = scored(dtype=torch.float32)
    wide = {
        field.name: value.double()
        for field in dataclasses.fields(rows)
        if isinstance(value := getattr(rows, field.name), torch.Tensor)
    }
    actual = advantages_of(rows, estimator)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, advantages_of(dataclasses.replace(rows, **wide), estimator).float())


def test_grpo_through_the_registry_is_grpo_advantage():
    rows = scored()
    for norm in (True, False):
        expected = grpo_advantage(rows.rewards, 4, norm_adv_by_std_in_grpo=norm)
        assert torch.equal(advantages_of(rows, "grpo", norm_adv_by_std_in_grpo=norm), expected)


# The registry and the settings


@pytest.fixture
def registry(monkeypatch):
    """Names registered in a test are forgotten after it."""
    monkeypatch.setattr("grpo_ext.objective.advantages.ADV_ESTIMATORS", {**ADV_ESTIMATORS})
    monkeypatch.setattr("grpo_ext.objective.advantages._TRAITS", {name: adv_traits(name) for name in NAMES})


def test_the_names():
    assert set(NAMES) == {
        *("grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        *("gpg", "gdpo", "remax"),
    }
    assert {name for name in NAMES if adv_traits(name).per_token} == set(PER_TOKEN)
    assert {name for name in NAMES if adv_traits(name).batch_wide} == {
        *("gpg", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    }


@pytest.mark.parametrize("estimator", NAMES)
def test_batch_wide_is_whether_other_groups_matter(estimator):
    rows = scored()
    rewards = rows.rewards.clone()
    rewards[:4] = f64([0.0, -3.0, 0.0, 6.0])
    tokens = rows.token_level_rewards.clone()
    tokens[:4] += 1
    parts = rows.rewards_per_func.clone()
    parts[:4] = f64([[0.0, 1.0], [2.0, 5.0], [0.5, 0.25], [9.0, 1.0]])
    moved = dataclasses.replace(rows, rewards=rewards, token_level_rewards=tokens, rewards_per_func=parts)
    same = torch.equal(advantages_of(rows, estimator)[4:], advantages_of(moved, estimator)[4:])
    assert same != adv_traits(estimator).batch_wide


def test_a_registered_estimator_is_called_with_what_is_promised(registry):
    seen = []

    @register_adv_est("mine", per_token=True, needs_several=True)
    def mine(responses, config):
        seen.append((responses, config.gamma))
        return torch.full(responses.response_mask.shape, 2.0, dtype=torch.float64)

    rewards = torch.tensor([1.0, NAN])
    actual = estimate(rewards, "mine", 2, torch.tensor([[1, 1, 0], [1, 0, 0]]), settings={"gamma": 0.5})
    assert actual.dtype == torch.float32 and actual.tolist() == [[2, 2, 0], [0, 0, 0]]
    responses, gamma = seen[0]
    assert gamma == 0.5  # its keys are unknown, so it may read it
    assert responses.rewards.dtype == torch.float64 and responses.response_mask.dtype == torch.bool
    assert responses.token_level_rewards.tolist() == [[0, 1, 0], [0, 0, 0]]
    with pytest.raises(ValueError, match="num_generations"):
        estimate(rewards, "mine", 1)


def test_a_bad_registration(registry):
    with pytest.raises(ValueError, match="'grpo' is already registered"):
        register_adv_est("grpo")(lambda responses, config: responses.rewards)
    with pytest.raises(TypeError, match=r'@register_adv_est\("name"\)'):

        @register_adv_est
        def forgotten(responses, config):
            return responses.rewards

    with pytest.raises(TypeError, match="per_tokens"):
        register_adv_est("mine", per_tokens=True)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(2, 1), r"shape \(2, 1\), expected \(2,\)"),
        (None, "NoneType"),
        (torch.tensor([0.0, NAN]), "infinity or NaN"),
    ],
)
def test_a_bad_output(registry, output, message):
    register_adv_est("mine")(lambda responses, config: output)
    with pytest.raises(ValueError, match=message):
        estimate(f64([1.0, 2.0]), "mine", 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adv_estimator": "gae"}, "'gae' is unknown; choose one of grpo, grpo_passk"),
        ({"adv_estimator": ["grpo"]}, "is unknown"),
        ({"norm_adv_by_std_in_grpo": 1}, "must be True or False"),
        ({"adv_estimator": "reinforce_plus_plus", "gamma": 0.0}, r"gamma=0.0 must be a number in \(0, 1\]"),
        ({"adv_estimator": "reinforce_plus_plus", "gamma": 1.5}, "gamma=1.5"),
        ({"adv_estimator": "reinforce_plus_plus", "gamma": NAN}, "gamma=nan"),
        ({"gamma": 0.9}, "no effect with adv_estimator='grpo'.*choose one of reinforce_plus_plus"),
        ({"adv_estimator": "remax", "gamma": 0.9}, "no effect"),
        ({"adv_estimator": "rloo", "norm_adv_by_std_in_grpo": False}, "no effect.*grpo, grpo_passk, gdpo"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        AdvantageConfig(**settings)


TWO = f64([1.0, 0.0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rewards": f64([1.0, 0.0, 1.0])}, "do not form groups of num_generations=2"),
        ({"rewards": torch.tensor([1, 0])}, "int64; give floats"),
        ({"response_mask": torch.ones(3, 1)}, r"response_mask has shape \(3, 1\)"),
        ({"token_level_rewards": torch.ones(2, 3)}, r"token_level_rewards has shape \(2, 3\), expected \(2, 4\)"),
        ({"rewards_per_func": torch.ones(3, 2)}, r"rewards_per_func has shape \(3, 2\), expected \(2, 2\)"),
        ({"rewards_per_func": torch.ones(2, 2), "reward_weights": torch.ones(3)}, "reward_weights has shape"),
        ({"reward_weights": torch.ones(2)}, "without rewards_per_func"),
        ({"reward_baselines": torch.ones(2, 1)}, "reward_baselines has shape"),
    ],
)
def test_shapes_that_do_not_fit(given, message):
    fields = {"rewards": TWO, "response_mask": torch.ones(2, 4), "num_generations": 2, **given}
    with pytest.raises(ValueError, match=message):
        ScoredResponses(**fields)


@pytest.mark.parametrize(
    ("estimator", "given", "message"),
    [
        ("grpo", {"rewards": f64([math.inf, 0.0])}, "rewards is infinite"),
        ("gdpo", {"rewards_per_func": f64([[math.inf], [0.0]])}, "rewards_per_func is infinite"),
        ("gdpo", {"rewards_per_func": TWO[:, None], "reward_weights": f64([NAN])}, "reward_weights is NaN"),
        ("remax", {}, "needs reward_baselines"),
        ("remax", {"reward_baselines": f64([-math.inf, 0.0])}, "reward_baselines is infinite"),
        ("reinforce_plus_plus", {"token_level_rewards": f64([[NAN], [0.0]])}, "token_level_rewards are infinite or"),
        ("grpo_passk", {"num_generations": 1}, "num_generations to 2 or more"),
    ],
)
def test_values_that_cannot_be_read(estimator, given, message):
    fields = {"rewards": TWO, "response_mask": torch.ones(2, 1), "num_generations": 2, **given}
    with pytest.raises(ValueError, match=message):
        advantages_of(ScoredResponses(**fields), estimator)


# KL in the reward


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in cases("kl_in_reward") if c["inputs"]])
def test_kl_in_reward_equals_verl(case):
    """Rewards, metrics and the coefficient over several rollouts; in two parts, as two ranks have them."""
    inputs, settings = case["inputs"], case["settings"]
    control = dict(settings["kl_ctrl"])
    controller = KLControl(control.pop("type"), **control).controller()
    old, mask = tensor(inputs["old_log_prob"]), tensor(inputs["response_mask"])
    scores = tensor(inputs["token_level_scores"])
    for update in case["outputs"]["updates"]:
        ref = tensor(inputs["ref_log_prob"][update["reference"]])
        parts = [
            kl_in_reward(old[rows], ref[rows], mask[rows], kl_penalty=settings["kl_penalty"], kl_coef=controller.value)
            for rows in (slice(0, 2), slice(2, 5))
        ]
        close(scores - torch.cat([penalty for penalty, _ in parts]), tensor(update["token_level_rewards"]))
        whole = Metric(sum(part.total for _, part in parts), sum(part.count for _, part in parts))
        assert float(whole) == pytest.approx(update["metrics"]["actor/reward_kl_penalty"], **TOL)
        assert controller.value == pytest.approx(update["metrics"]["actor/reward_kl_penalty_coeff"], **TOL)
        controller.update(float(whole), whole.count)
        assert controller.value == pytest.approx(update["kl_coef_after"], **TOL)


def test_the_adaptive_controller_equals_verl():
    (case,) = [c for c in cases("kl_in_reward") if c["name"] == "controller_alone"]
    control = case["settings"]["kl_ctrl"]
    controller = AdaptiveKLController(control["kl_coef"], control["target_kl"], control["horizon"])
    for update in case["outputs"]["updates"]:
        controller.update(update["current_kl"], update["n_steps"])
        assert controller.value == pytest.approx(update["kl_coef_after"], **TOL)


def test_kl_in_reward_by_hand():
    # d = 1, -2 | 3, and a row without a token; k1 times 0.1; the statistic: ((1 - 2) / 2 + 3 + 0) / 3
    old = f64([[0.0, -1.0], [-1.0, 5.0], [7.0, 7.0]])
    ref = f64([[-1.0, 1.0], [-4.0, 5.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    penalty, statistic = kl_in_reward(old, ref, mask, kl_penalty="k1", kl_coef=0.1)
    assert penalty.view(-1).tolist() == pytest.approx([0.1, -0.2, 0.3, 0, 0, 0], **TOL)
    assert (float(statistic.total), statistic.count) == (2.5, 3)


@pytest.mark.parametrize("name", KL_PENALTIES)
@pytest.mark.parametrize("garbage", [1e4, NAN, -math.inf])
def test_kl_in_reward_reads_only_the_mask_and_has_no_gradient(name, garbage):
    rows = scored()
    old, ref = rows.token_level_rewards.clone().requires_grad_(), rows.token_level_rewards.flip(0)
    mask = rows.response_mask.bool()
    penalty, statistic = kl_in_reward(old, ref, mask, kl_penalty=name, kl_coef=0.3)
    dirty = [torch.where(mask, x, garbage) for x in (old, ref)]
    again, statistic_again = kl_in_reward(*dirty, mask, kl_penalty=name, kl_coef=0.3)
    assert not penalty.requires_grad and torch.isfinite(again).all() and penalty.any()
    assert torch.equal(penalty, again) and not penalty[~mask].any()
    assert float(statistic) == float(statistic_again)


def test_controllers_by_hand():
    adaptive = KLControl("adaptive", kl_coef=0.5, target_kl=0.1, horizon=100).controller()
    adaptive.update(0.11, 10)  # 10 % above: times 1 + 0.1 * 10 / 100
    assert adaptive.value == pytest.approx(0.505, **TOL)
    adaptive.update(-3.0, 50)  # far below: times 1 - 0.2 * 50 / 100
    assert adaptive.value == pytest.approx(0.505 * 0.9, **TOL)
    again = KLControl("adaptive", kl_coef=0.9, target_kl=0.1, horizon=100).controller()
    again.load_state(adaptive.state())
    assert again.value == adaptive.value
    fixed = KLControl(kl_coef=0.25).controller()
    fixed.update(5.0, 1000)
    assert isinstance(fixed, FixedKLController) and fixed.value == 0.25
    other = KLControl(kl_coef=0.125).controller()
    other.load_state(fixed.state())  # the configured coefficient stays in force
    assert other.value == 0.125
    for controller, state in ((fixed, adaptive.state()), (adaptive, fixed.state())):
        with pytest.raises(ValueError, match="does not fit the checkpoint"):
            controller.load_state(state)


def test_the_adaptive_controller_refuses_what_would_ruin_it():
    controller = AdaptiveKLController(0.2, 0.1, 100)
    for bad in (NAN, math.inf):
        with pytest.raises(ValueError, match="must be a finite number"):
            controller.update(bad, 8)
    with pytest.raises(ValueError, match="horizon=100 is too short for n_steps=500"):
        controller.update(0.0, 500)
    assert controller.value == 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_ctrl": "other"}, "choose one of fixed, adaptive"),
        ({"kl_coef": -0.1}, "kl_coef=-0.1 must be a finite number >= 0"),
        ({"kl_coef": NAN}, "kl_coef=nan"),
        ({"kl_ctrl": "adaptive", "kl_coef": 0.0}, "stays 0"),
        ({"kl_ctrl": "adaptive", "target_kl": 0.0}, "target_kl=0.0 must be a finite number > 0"),
        ({"kl_ctrl": "adaptive", "horizon": 0}, "horizon=0"),
        ({"target_kl": 0.2}, "target_kl=0.2 has no effect with kl_ctrl='fixed'"),
        ({"horizon": 5}, "horizon=5 has no effect"),
    ],
)
def test_bad_kl_control(settings, message):
    with pytest.raises(ValueError, match=message):
        KLControl(**settings)


def test_bad_kl_in_reward():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="kl_penalty='full' is unknown"):
        kl_in_reward(x, x, x, kl_penalty="full", kl_coef=0.1)
    with pytest.raises(ValueError, match="ref_log_prob has shape"):
        kl_in_reward(x, x[:, :2], x, kl_penalty="kl", kl_coef=0.1)
    with pytest.raises(ValueError, match="kl_coef=None"):
        kl_in_reward(x, x, x, kl_penalty="kl", kl_coef=None)


# The overlong penalty


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in cases("dapo_overlong")])
def test_overlong_penalty_equals_verl(case):
    settings, outputs = case["settings"], case["outputs"]
    lengths = torch.tensor(case["inputs"]["lengths"])
    penalty = overlong_penalty(lengths, settings["max_resp_len"], settings["len"], settings["penalty_factor"])
    close(penalty, tensor(outputs["overlong_reward"]), FLOAT32)
    close(case["inputs"]["score"] + penalty, tensor(outputs["reward"]), FLOAT32)
    assert (penalty < 0).tolist() == outputs["overlong"]


def test_overlong_penalty_by_hand():
    # maximum 10, buffer 4, factor 0.5: nothing up to 6, then 0.125 per token, 0.5 at 10, more beyond
    penalty = overlong_penalty(torch.tensor([0, 6, 7, 10, 12]), 10, 4, 0.5)
    assert penalty.tolist() == [0.0, 0.0, -0.125, -0.5, -0.75]
    assert overlong_penalty(f64([9.0]), 10, 4, 0.5).dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11, 1.0), "overlong_buffer_len=11 is longer than max_response_length=10"),
        ((10, 0, 1.0), "overlong_buffer_len=0 must be a finite number > 0"),
        ((0, 0, 1.0), "max_response_length=0"),
        ((10, 4, -1.0), "overlong_buffer_penalty_factor=-1.0"),
        ((10, 4, None), "overlong_buffer_penalty_factor=None"),
    ],
)
def test_bad_overlong_penalty(arguments, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([3]), *arguments)
    with pytest.raises(ValueError, match=r"lengths have shape \(1, 1\)"):
        overlong_penalty(torch.tensor([[3]]), 10, 4, 1.0)
