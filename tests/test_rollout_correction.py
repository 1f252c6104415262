"""Rollout correction: rows worked by hand, verl 0.9.1's recorded numbers, and what must not matter."""

import math

import pytest
import torch
from goldens_io import FLOAT32, FLOAT64, cases, tensor

from grpo_ext.objective.metrics import Metric
from grpo_ext.objective.rollout_correction import (
    ROLLOUT_RS_OPTIONS,
    RolloutCorrection,
    finish_rollout_metrics,
    rejection_mask,
    rollout_correction_metrics,
    rollout_correction_weights,
    weight_sums,
)

TOL = {"rel": 1e-9, "abs": 1e-12}
PREFIX = "rollout_corr/"


def log(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def weights_of(ratios: list[list[float]], mask: list[list[int]], **settings) -> list[list[float]]:
    """Weights of tokens whose pi_train / pi_rollout are these."""
    rollout = torch.full_like(log(ratios), -1.0)
    return rollout_correction_weights(
        rollout + log(ratios), rollout, torch.tensor(mask), RolloutCorrection(**settings)
    ).tolist()


def mask_of(ratios: list[list[float]], mask: list[list[int]], **settings) -> list[list[int]]:
    rollout = torch.full_like(log(ratios), -1.0)
    return rejection_mask(rollout + log(ratios), rollout, torch.tensor(mask), RolloutCorrection(**settings)).tolist()


def combined(parts: list[dict[str, Metric]]) -> dict[str, float]:
    """Metrics of several micro-batches as one, as the trainer's sums do it."""
    values = {}
    for name in parts[0]:
        metrics = [part[name] for part in parts]
        totals = [float(metric.total) for metric in metrics]
        if metrics[0].extreme:
            values[name] = {"max": max, "min": min}[metrics[0].extreme](totals)
        else:
            values[name] = sum(totals) / max(sum(float(metric.count) for metric in metrics), 1)
    return finish_rollout_metrics(values)


# Weights by hand. Row 1: ratios 0.25, 1.5, 4, the last one masked; row 2: 2, 2, 2.
RATIOS = [[0.25, 1.5, 4.0], [2.0, 2.0, 2.0]]
MASK = [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # the ratio is train over rollout, and only ratios above 1.8 are cut
        ({"rollout_is": "token", "rollout_is_threshold": 1.8}, [[0.25, 1.5, 0], [1.8, 1.8, 1.8]]),
        # IcePop: 0.25 lies below 0.5 and goes; 1.5 stays; 2 lies above 1.8
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_1.8"}, [[0, 1.5, 0], [0, 0, 0]]),
        # row 1: 0.25 * 1.5 = 0.375 on both tokens; row 2: 2^3 = 8, cut at 5
        ({"rollout_is": "sequence", "rollout_is_threshold": 5.0}, [[0.375, 0.375, 0], [5, 5, 5]]),
        # 0.375 lies below 0.5, 8 inside
        ({"rollout_is": "sequence", "rollout_is_threshold": "0.5_10"}, [[0, 0, 0], [8, 8, 8]]),
        # over tokens: (0.25 + 1.5 + 3 * 1.75) / 5 = 1.4
        (
            {"rollout_is": "token", "rollout_is_threshold": 1.75, "rollout_is_batch_normalize": True},
            [[0.25 / 1.4, 1.5 / 1.4, 0], [1.25, 1.25, 1.25]],
        ),
        # over rows, each once, though row 2 has more tokens: (0.375 + 2.025) / 2 = 1.2
        (
            {"rollout_is": "sequence", "rollout_is_threshold": 2.025, "rollout_is_batch_normalize": True},
            [[0.3125, 0.3125, 0], [1.6875, 1.6875, 1.6875]],
        ),
    ],
)
def test_weights_by_hand(settings, expected):
    actual = weights_of(RATIOS, MASK, **settings)
    for row, expected_row in zip(actual, expected, strict=True):
        assert row == pytest.approx(expected_row, **TOL)


def test_the_bounds_themselves_are_inside():
    for threshold in ("1_2", "0.5_1"):
        assert weights_of([[1.0]], [[1]], rollout_is="token", rollout_is_threshold=threshold) == [[1.0]]
        assert mask_of([[1.0]], [[1]], rollout_rs="token_k1", rollout_rs_threshold=threshold) == [[1]]


def test_a_rollout_that_was_surer_than_the_trained_policy_weighs_less():
    # log pi_train - log pi_rollout = -2 - (-1) = -1
    old, rollout = torch.tensor([[-2.0]]), torch.tensor([[-1.0]])
    weights = rollout_correction_weights(old, rollout, torch.ones(1, 1), RolloutCorrection(rollout_is="token"))
    assert weights.item() == pytest.approx(math.exp(-1), rel=1e-6)


def test_log_ratios_are_clamped_at_20():
    old = torch.tensor([[-90.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    rollout = torch.tensor([[-1.0, -90.0], [-15.0, -15.0]], dtype=torch.float64)
    mask = torch.ones(2, 2)
    config = RolloutCorrection(rollout_is="token", rollout_is_threshold=1e9)
    # gaps -89 and 89 become -20 and 20; 14 stays
    expected = [[math.exp(-20), math.exp(20)], [math.exp(14)] * 2]
    actual = rollout_correction_weights(old, rollout, mask, config).tolist()
    assert actual == [pytest.approx(row, **TOL) for row in expected]
    # of a row the sum is clamped: -89 + 89 = 0, 14 + 14 becomes 20
    config = RolloutCorrection(rollout_is="sequence", rollout_is_threshold=1e9)
    actual = rollout_correction_weights(old, rollout, mask, config).tolist()
    assert actual == [[1.0, 1.0], [pytest.approx(math.exp(20), **TOL)] * 2]


def test_weights_that_are_all_zero_are_not_divided_by_their_mean():
    weights = weights_of(
        [[3.0, 4.0]], [[1, 1]], rollout_is="token", rollout_is_threshold="0.5_2", rollout_is_batch_normalize=True
    )
    assert weights == [[0.0, 0.0]]


# Rejection by hand.
#   x        = log 2 = 0.693, log 0.5 = -0.693, log 1.1 = 0.0953, log 0.9 = -0.105
#   k2       = 0.240, 0.240, 0.00454, 0.00555
#   k3       = 2 - 1 - 0.693 = 0.307, 0.5 - 1 + 0.693 = 0.193, 1.1 - 1.0953 = 0.00469, 0.9 - 1 + 0.105 = 0.00536
# Row 1: ratios 2, 1.1, and 0.5 masked. Row 2: 0.5, 0.9, 1.1. Row 3: nothing valid.
REJECTED = [[2.0, 1.1, 0.5], [0.5, 0.9, 1.1], [9.0, 9.0, 9.0]]
VALID = [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
NONE = [0, 0, 0]


REJECTION_CASES = [
    # the ratio train / rollout itself: 2 and 1.1 are below 2.5, 0.5 is below 0.6
    ("token_k1", "0.6_2.5", [[1, 1, 0], [0, 1, 1], NONE]),
    # mirrored: 2 is above 1.5, 0.5 is above 0.4
    ("token_k1", "0.4_1.5", [[0, 1, 0], [1, 1, 1], NONE]),
    # one number: 1/1.5 to 1.5
    ("token_k1", 1.5, [[0, 1, 0], [0, 1, 1], NONE]),
    ("token_k2", 0.1, [[0, 1, 0], [0, 1, 1], NONE]),
    # 0.307 goes, 0.193 stays
    ("token_k3", 0.25, [[0, 1, 0], [1, 1, 1], NONE]),
    # products 2 * 1.1 = 2.2 and 0.5 * 0.9 * 1.1 = 0.495
    ("seq_sum_k1", "0.4_2", [NONE, [1, 1, 1], NONE]),
    ("seq_sum_k1", "0.6_3", [[1, 1, 0], NONE, NONE]),
    # sums 0.2448 and 0.2503
    ("seq_sum_k2", 0.248, [[1, 1, 0], NONE, NONE]),
    # sums 0.3115 and 0.2032
    ("seq_sum_k3", 0.25, [NONE, [1, 1, 1], NONE]),
    # geometric means sqrt(2.2) = 1.48 and 0.495^(1/3) = 0.791
    ("seq_mean_k1", "0.75_1.4", [NONE, [1, 1, 1], NONE]),
    ("seq_mean_k1", "0.85_1.5", [[1, 1, 0], NONE, NONE]),
    # means 0.1224 and 0.0834
    ("seq_mean_k2", 0.1, [NONE, [1, 1, 1], NONE]),
    # means 0.1557 and 0.0677
    ("seq_mean_k3", 0.1, [NONE, [1, 1, 1], NONE]),
    # both 0.2402, the masked 0.5 not among them
    ("seq_max_k2", 0.2, [NONE, NONE, NONE]),
    ("seq_max_k2", 0.25, VALID),
    # maxima 0.307 and 0.193
    ("seq_max_k3", 0.25, [NONE, [1, 1, 1], NONE]),
    # both have to pass: the token bound drops 2 and 0.5, the row bound row 1
    ("token_k1,seq_mean_k2", "0.6_1.5,0.1", [NONE, [0, 1, 1], NONE]),
    # one threshold for both
    ("token_k2, seq_max_k3", 0.25, [NONE, [1, 1, 1], NONE]),
]


@pytest.mark.parametrize(("option", "threshold", "expected"), REJECTION_CASES)
def test_rejection_by_hand(option, threshold, expected):
    assert mask_of(REJECTED, VALID, rollout_rs=option, rollout_rs_threshold=threshold) == expected


def test_every_option_is_worked_by_hand():
    assert set(ROLLOUT_RS_OPTIONS) == {option for option, *_ in REJECTION_CASES if "," not in option}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_mask_keeps_its_dtype(dtype):
    rollout, mask = torch.zeros(3, 3), torch.tensor(VALID, dtype=dtype)
    config = RolloutCorrection(rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="0.6_2.5,0.25")
    kept = rejection_mask(torch.tensor(REJECTED).log(), rollout, mask, config)
    assert kept.dtype == dtype
    assert kept.int().tolist() == [[1, 1, 0], [0, 1, 1], NONE]
    assert mask.int().tolist() == VALID  # the one given is left alone


def test_without_a_setting_nothing_is_weighted_or_rejected():
    config = RolloutCorrection()
    assert not config.active
    assert RolloutCorrection(rollout_is="token").active
    assert RolloutCorrection(rollout_rs="token_k2", rollout_rs_threshold=0.1).active
    old, mask = torch.zeros(1, 2), torch.tensor([[1, 0]])
    assert rollout_correction_weights(old, old - 3, mask, config) is None
    assert rejection_mask(old, old - 3, mask, config).tolist() == [[1, 0]]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_unknown_rollout_log_prob_is_ratio_1(level):
    old = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
    rollout = torch.tensor([[-1.5, math.nan, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]])
    config = RolloutCorrection(
        rollout_is=level, rollout_is_threshold="0.5_1.9", rollout_rs="token_k1", rollout_rs_threshold=1.2
    )
    weights = rollout_correction_weights(old, rollout, mask, config)
    known = math.exp(0.5)
    assert weights.tolist() == [pytest.approx([known, 1 if level == "token" else known, 0], **TOL)]
    assert rejection_mask(old, rollout, mask, config).tolist() == [[0, 1, 0]]
    metrics = combined([rollout_correction_metrics(old, rollout, mask, config)])
    assert metrics[f"{PREFIX}nan_fraction"] == 0.5
    assert metrics[f"{PREFIX}kl"] == pytest.approx(-0.25, **TOL)  # (-0.5 + 0) / 2
    assert metrics[f"{PREFIX}rollout_log_ppl"] == pytest.approx(1.75, **TOL)  # (1.5 + 2) / 2
    assert all(math.isfinite(value) for value in metrics.values())


def test_metrics_by_hand():
    """Row 1: ratios 2 and 0.5; row 2: 4; row 3: nothing."""
    ratios, mask = log([[2.0, 0.5], [4.0, 7.0], [7.0, 7.0]]), torch.tensor([[1, 1], [1, 0], [0, 0]])
    rollout = torch.full_like(ratios, -1.0)
    config = RolloutCorrection(
        rollout_is="token", rollout_is_threshold=3.0, rollout_rs="token_k1", rollout_rs_threshold="0.6_3"
    )
    values = combined([rollout_correction_metrics(rollout + ratios, rollout, mask, config)])
    log2 = math.log(2)
    expected = {
        "kl": -2 * log2 / 3,  # -(log 2 - log 2 + 2 log 2) / 3
        "k3_kl": (2 + 0.5 + 4 - 3 - 2 * log2) / 3,
        "chi2_token": (4 + 0.25 + 16) / 3 - 1,
        "chi2_seq": (1 + 16) / 2 - 1,  # squares of 2 * 0.5 and of 4
        "rollout_ppl": math.e,
        "rollout_log_ppl": 1.0,
        "training_ppl": (math.e + math.e / 4) / 2,
        "training_log_ppl": 1 - log2,
        "log_ppl_diff": -log2,  # 0 and -2 log 2
        "log_ppl_abs_diff": log2,
        "log_ppl_diff_max": 0.0,
        "log_ppl_diff_min": -2 * log2,
        "ppl_ratio": (1 + 0.25) / 2,  # train over rollout
        "nan_fraction": 0.0,
        # weights 2, 0.5, 3
        "rollout_is_mean": 5.5 / 3,
        "rollout_is_max": 3.0,
        "rollout_is_min": 0.5,
        "rollout_is_ratio_fraction_high": 1 / 3,  # 4 above 3
        "rollout_is_ratio_fraction_low": 0.0,  # none below 1/3
        "rollout_is_std": math.sqrt(13.25 / 3 - (5.5 / 3) ** 2),
        "rollout_is_eff_sample_size": (5.5 / 3 + 1e-8) ** 2 / (13.25 / 3),
        "rollout_is_seq_mean": (1.25 + 3) / 2,
        "rollout_is_seq_std": 1.75 / math.sqrt(2),
        "rollout_is_seq_max": 3.0,
        "rollout_is_seq_min": 1.25,
        "rollout_is_seq_max_deviation": 2.0,
        "rollout_is_seq_fraction_high": 0.5,
        "rollout_is_seq_fraction_low": 0.0,
        # statistics log 2, -log 2, 2 log 2; kept: only 2, for 0.5 < 0.6 and 4 > 3
        "rollout_rs_masked_fraction": 2 / 3,
        "rollout_rs_seq_masked_fraction": 1.0,
        "rollout_rs_token_k1_masked_fraction": 2 / 3,
        "rollout_rs_token_k1_seq_masked_fraction": 1.0,
        "rollout_rs_token_k1_mean": 2 * log2 / 3,
        "rollout_rs_token_k1_max": 2 * log2,
        "rollout_rs_token_k1_min": -log2,
        "rollout_rs_token_k1_fraction_high": 1 / 3,
        "rollout_rs_token_k1_fraction_low": 1 / 3,
        # clamped to log 0.6 and log 3: log 2, log 0.6, log 3
        "rollout_rs_token_k1_std": torch.tensor([2, 0.6, 3], dtype=torch.float64).log().std(correction=0).item(),
        "rollout_rs_token_k1_seq_mean": log2,
        "rollout_rs_token_k1_seq_std": math.sqrt(2) * log2,
        "rollout_rs_token_k1_seq_max": 2 * log2,
        "rollout_rs_token_k1_seq_min": 0.0,
        "rollout_rs_token_k1_seq_max_deviation": 2 * log2,
        "rollout_rs_token_k1_seq_fraction_high": 0.5,
        "rollout_rs_token_k1_seq_fraction_low": 0.0,
    }
    assert values == {PREFIX + name: pytest.approx(value, rel=1e-7, abs=1e-12) for name, value in expected.items()}


# Goldens


def named(all_cases):
    return [pytest.param(case, id=case["name"]) for case in all_cases]


GOLDENS = cases("rollout_corr")


def converted(settings: dict) -> RolloutCorrection:
    """The config of a golden: verl's k1 bounds `a_b` are of the reciprocal of our ratio (README, departure 18)."""
    settings = dict(settings)
    if settings["rollout_rs"] is not None:
        options = list(dict.fromkeys(option.strip() for option in settings["rollout_rs"].split(",")))
        thresholds = str(settings["rollout_rs_threshold"]).split(",")
        thresholds = thresholds * len(options) if len(thresholds) == 1 else thresholds
        settings["rollout_rs_threshold"] = ",".join(
            "_".join(str(1 / float(bound)) for bound in reversed(threshold.split("_")))
            if option.endswith("_k1") and "_" in threshold
            else threshold
            for option, threshold in zip(options, thresholds, strict=True)
        )
    return RolloutCorrection(**settings)


def inputs_of(case: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs = case["inputs"]
    mask = torch.tensor(inputs["response_mask"])
    return tensor(inputs["old_log_prob"]), tensor(inputs["rollout_log_prob"]), mask


def test_the_conversion_of_thresholds():
    settings = {"rollout_rs": "seq_max_k2,token_k1,seq_sum_k1", "rollout_rs_threshold": "0.1, 0.5_4, 1.5"}
    bounds = converted(settings).rejection_bounds
    assert bounds["seq_max_k2"] == (None, 0.1)
    assert bounds["token_k1"] == pytest.approx((math.log(0.25), math.log(2)), **TOL)
    assert bounds["seq_sum_k1"] == pytest.approx((-math.log(1.5), math.log(1.5)), **TOL)


@pytest.mark.parametrize("case", named(GOLDENS))
def test_golden_weights_and_masks(case):
    config = converted(case["settings"])
    expected = tensor(case["outputs"]["rollout_is_weights"])
    weights = rollout_correction_weights(*inputs_of(case), config)
    if expected is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights, expected, **FLOAT64)
    assert rejection_mask(*inputs_of(case), config).tolist() == case["outputs"]["response_mask"]


# verl's value of a row without a valid token, which it counts in these means and extremes; we leave such rows out.
EMPTY_ROW = {
    "training_ppl": 1.0,
    "training_log_ppl": 0.0,
    "rollout_ppl": 1.0,
    "rollout_log_ppl": 0.0,
    "log_ppl_diff": 0.0,
    "log_ppl_abs_diff": 0.0,
    "log_ppl_diff_max": 0.0,
    "log_ppl_diff_min": 0.0,
    "ppl_ratio": 1.0,
    "chi2_seq": 0.0,
    "rollout_is_seq_mean": 0.0,
    "rollout_is_seq_std": 0.0,
    "rollout_is_seq_max": 0.0,
    "rollout_is_seq_min": 0.0,
    "rollout_is_seq_max_deviation": 1.0,
    "rollout_is_seq_fraction_high": 0.0,
    "rollout_is_seq_fraction_low": 1.0,
    "rollout_rs_seq_masked_fraction": 0.0,
}
EMPTY_ROW_OF_SEQUENCE_WEIGHTS = {
    "rollout_is_max": 1.0,
    "rollout_is_min": 1.0,
    "rollout_is_ratio_fraction_high": 0.0,
    "rollout_is_ratio_fraction_low": 0.0,
}
# k1 is the log ratio here and its negative there.
NEGATED = {"mean": "mean", "max": "min", "min": "max", "seq_mean": "seq_mean", "seq_max": "seq_min"}
NEGATED |= {"seq_min": "seq_max"}
SWAPPED = {"fraction_high": "fraction_low", "fraction_low": "fraction_high"}
SWAPPED |= {"seq_fraction_high": "seq_fraction_low", "seq_fraction_low": "seq_fraction_high"}


def as_verl(values: dict[str, float], name: str) -> float:
    """verl's value of a metric from ours, but for the rows without a valid token."""
    stem, separator, suffix = name.partition("_k1_")
    if not separator:
        return values[name]
    if suffix in NEGATED:
        return -values[f"{stem}_k1_{NEGATED[suffix]}"]
    return values[f"{stem}_k1_{SWAPPED.get(suffix, suffix)}"]


def with_empty_rows(name: str, value: float, empty_value: float, rows: int, empty: int, mean: float) -> float:
    """A metric over `rows` rows after adding `empty` more, each with `empty_value`."""
    if name.endswith("_max") or name.endswith("_deviation"):
        return max(value, empty_value)
    if name.endswith("_min"):
        return min(value, empty_value)
    if name.endswith("_std"):  # both sums of squares about zero, then about the new mean
        squares = value**2 * (rows - 1) + rows * mean**2
        new_mean = rows * mean / (rows + empty)
        return math.sqrt((squares - (rows + empty) * new_mean**2) / (rows + empty - 1))
    return (value * rows + empty_value * empty) / (rows + empty)


def tolerance_of(name: str) -> dict[str, float]:
    """tests/goldens/README.md: float32 comparisons, and standard deviations as differences of squares."""
    if "fraction_" in name or name.endswith("_oob_ratio") or name == "rollout_rs_seq_masked_fraction":
        return FLOAT32
    return {"rtol": 1e-9, "atol": 1e-9} if name.endswith("_std") else FLOAT64


@pytest.mark.parametrize("case", named(GOLDENS))
def test_golden_metrics(case):
    config = converted(case["settings"])
    old, rollout, mask = inputs_of(case)
    values = combined([rollout_correction_metrics(old, rollout, mask, config)])
    values = {name.removeprefix(PREFIX): value for name, value in values.items()}
    rows = int(mask.any(-1).sum())
    empty = len(mask) - rows
    recorded = {name.removeprefix(PREFIX): float(value) for name, value in case["outputs"]["metrics"].items()}
    counted = EMPTY_ROW | (EMPTY_ROW_OF_SEQUENCE_WEIGHTS if config.rollout_is == "sequence" else {})
    compared = set()
    for name, expected in recorded.items():
        if name.startswith("rollout_rs") and name.endswith("_fraction_low") and "_k1_" not in name:
            assert expected == 0 and name not in values  # k2 and k3 have no lower bound
            continue
        value = as_verl(values, name)
        if empty and name in counted:
            value = with_empty_rows(name, value, counted[name], rows, empty, values.get("rollout_is_seq_mean", 0.0))
        actual, wanted = torch.tensor([value, expected], dtype=torch.float64)
        torch.testing.assert_close(actual, wanted, **tolerance_of(name), msg=lambda text, name=name: f"{name}: {text}")
        compared.add(name)
    assert len(values) == len(compared) + 1 and "nan_fraction" in values  # nothing of ours was left uncompared


# Invariances

B, T = 6, 5
EVERYTHING = [
    RolloutCorrection(
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=True,
        rollout_rs=",".join(ROLLOUT_RS_OPTIONS),
        rollout_rs_threshold=1.6,
    )
    for level in ("token", "sequence")
    for threshold in (1.3, "0.6_1.4")
]


def batch(dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uneven rows, one of them wholly masked, one with a hole, one token without a rollout log-prob."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.randn(B, T, generator=generator, dtype=torch.float64).abs()
    old = rollout + 0.4 * torch.randn(B, T, generator=generator, dtype=torch.float64)
    rollout[4, 1] = math.nan
    mask = (torch.arange(T) < torch.tensor([5, 1, 4, 0, 3, 5])[:, None]).long()
    mask[2, 1] = 0  # a tool's output
    return old.to(dtype), rollout.to(dtype), mask


@pytest.mark.parametrize("config", EVERYTHING)
@pytest.mark.parametrize("splits", [[slice(0, 1), slice(1, 6)], [slice(i, i + 1) for i in range(6)]])
def test_parts_of_a_batch_add_up_to_it(config, splits):
    old, rollout, mask = batch()
    parts = [(old[part], rollout[part], mask[part]) for part in splits]
    whole = rollout_correction_weights(old, rollout, mask, config)
    sums = [
        weight_sums(rollout_correction_weights(*part, config, mean=1), part[-1], config) for part in parts
    ]  # what ranks would exchange
    mean = sum(total for total, _ in sums) / sum(count for _, count in sums)
    together = torch.cat([rollout_correction_weights(*part, config, mean=mean) for part in parts])
    torch.testing.assert_close(together, whole, **FLOAT64)
    assert not torch.equal(torch.cat([rollout_correction_weights(*part, config) for part in parts]), whole)

    masks = torch.cat([rejection_mask(*part, config) for part in parts])
    assert torch.equal(masks, rejection_mask(old, rollout, mask, config))

    metrics = combined([rollout_correction_metrics(*part, config) for part in parts])
    assert metrics == {
        name: pytest.approx(value, rel=1e-9, abs=1e-9)
        for name, value in combined([rollout_correction_metrics(old, rollout, mask, config)]).items()
    }


@pytest.mark.parametrize("config", EVERYTHING)
def test_the_normalised_weights_have_mean_1(config):
    old, rollout, mask = batch()
    weights = rollout_correction_weights(old, rollout, mask, config)
    total, count = weight_sums(weights, mask, config)
    assert count.item() == (17 if config.rollout_is == "token" else 5)
    assert (total / count).item() == pytest.approx(1.0, **TOL)


@pytest.mark.parametrize("config", EVERYTHING)
@pytest.mark.parametrize("garbage", [1e4, -1e4, math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_reaches_nothing(config, garbage):
    old, rollout, mask = batch()
    soiled = [torch.where(mask.bool(), x, garbage) for x in (old, rollout)]
    assert torch.equal(
        rollout_correction_weights(*soiled, mask, config), rollout_correction_weights(old, rollout, mask, config)
    )
    assert torch.equal(rejection_mask(*soiled, mask, config), rejection_mask(old, rollout, mask, config))
    assert combined([rollout_correction_metrics(*soiled, mask, config)]) == combined(
        [rollout_correction_metrics(old, rollout, mask, config)]
    )


@pytest.mark.parametrize("config", EVERYTHING)
def test_a_micro_batch_without_a_valid_token_changes_nothing(config):
    old, rollout, mask = batch()
    nothing = torch.zeros_like(mask)
    weights = rollout_correction_weights(old, rollout, nothing, config)
    assert not weights.any() and not rejection_mask(old, rollout, nothing, config).any()
    empty = rollout_correction_metrics(old, rollout, nothing, config)
    assert all(math.isinf(metric.value) for metric in empty.values() if metric.extreme)
    full = rollout_correction_metrics(old, rollout, mask, config)
    assert combined([full, empty]) == combined([full])


def test_weights_carry_no_gradient():
    old, rollout, mask = batch()
    weights = rollout_correction_weights(old.requires_grad_(), rollout, mask, RolloutCorrection(rollout_is="token"))
    metrics = rollout_correction_metrics(old, rollout, mask, EVERYTHING[0])
    assert not weights.requires_grad
    assert not any(torch.is_tensor(m.total) and m.total.requires_grad for m in metrics.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(dtype):
    old, rollout, mask = batch(dtype)
    config = EVERYTHING[0]
    weights = rollout_correction_weights(old, rollout, mask, config)
    assert weights.dtype == torch.float32
    exact = rollout_correction_weights(old.double(), rollout.double(), mask, config)
    torch.testing.assert_close(weights.double(), exact, **FLOAT32)


def test_a_small_spread_survives_float32():
    # ratios around 1 with a spread of 1e-4: in float32 the difference of squares would be noise
    spread = 1e-4 * torch.tensor([[1.0, -1.0, 1.0, -1.0]] * 500)
    rollout = torch.full_like(spread, -1.0, dtype=torch.float64)
    config = RolloutCorrection(rollout_is="token")
    old = (rollout + spread).float()
    values = combined([rollout_correction_metrics(old, rollout.float(), torch.ones_like(old), config)])
    assert values[f"{PREFIX}rollout_is_std"] == pytest.approx(1e-4, rel=2e-3)  # log-probs are rounded to 1.2e-7
    assert values[f"{PREFIX}rollout_is_eff_sample_size"] == pytest.approx(1.0, abs=1e-7)


def test_finishing_leaves_other_metrics_alone():
    values = {"actor/pg_loss": 1.0, "custom_std/square": 2.0}
    assert finish_rollout_metrics(values) == values


def test_all_weights_masked_is_an_effective_sample_size_of_0():
    config = RolloutCorrection(rollout_is="token", rollout_is_threshold="0.5_2")
    old = torch.zeros(1, 2)
    values = combined([rollout_correction_metrics(old, old - 3, torch.ones(1, 2), config)])
    assert values[f"{PREFIX}rollout_is_eff_sample_size"] == 0
    assert values[f"{PREFIX}rollout_is_oob_ratio"] == 1


# Bad input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout_is": "row"}, ["rollout_is='row'", "token, sequence"]),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, ["rollout_is_threshold=0", "> 0"]),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, ["> 0"]),
        ({"rollout_is": "token", "rollout_is_threshold": math.nan}, ["finite"]),
        ({"rollout_is": "token", "rollout_is_threshold": "inf"}, ["finite"]),
        ({"rollout_is": "token", "rollout_is_threshold": True}, ["rollout_is_threshold=True", "a number"]),
        ({"rollout_is": "token", "rollout_is_threshold": None}, ["rollout_is_threshold=None", "a number"]),
        ({"rollout_is": "token", "rollout_is_threshold": ""}, ["lower_upper"]),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5-2"}, ["'0.5-2'", "lower_upper"]),
        # float("5_2") is 52: a third bound must not pass for digits
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5_2"}, ["'0.5_5_2'", "lower_upper"]),
        ({"rollout_is": "token", "rollout_is_threshold": "0_2"}, ["> 0"]),
        ({"rollout_is": "token", "rollout_is_threshold": "2_0.5"}, ["'2_0.5'", "wrong way round"]),
        ({"rollout_is_threshold": 3.0}, ["rollout_is_threshold=3.0", "rollout_is=None"]),
        ({"rollout_is_batch_normalize": True}, ["rollout_is_batch_normalize=True", "rollout_is=None"]),
        ({"rollout_is": "token", "rollout_is_batch_normalize": 1}, ["True or False"]),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, ["'seq_max_k1'", "seq_max_k2", "token_k1"]),
        ({"rollout_rs": "token_k1,", "rollout_rs_threshold": 2}, ["unknown option ''"]),
        ({"rollout_rs": "", "rollout_rs_threshold": 2}, ["unknown option ''"]),
        ({"rollout_rs": ["token_k1"], "rollout_rs_threshold": 2}, ["comma-separated"]),
        ({"rollout_rs": "token_k1"}, ["rollout_rs='token_k1'", "needs rollout_rs_threshold"]),
        ({"rollout_rs_threshold": 2}, ["rollout_rs_threshold=2", "rollout_rs=None"]),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2,3"}, ["2 thresholds", "1 options"]),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,3"}, ["2 thresholds", "3 options"]),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "4_2"}, ["wrong way round"]),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, ["below its lower bound", "token_k1"]),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "-1_2"}, ["> 0"]),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": True}, ["a number"]),
        ({"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": "0.1_0.2"}, ["'0.1_0.2'", "seq_sum_k2", "one upper"]),
        ({"rollout_rs": "token_k1,token_k3", "rollout_rs_threshold": "0.5_2"}, ["token_k3", "one upper"]),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": 0}, ["> 0"]),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "a"}, ["'a'"]),
        ({"rollout_rs": "token_k1,token_k3", "rollout_rs_threshold": "0.5_2,"}, ["''"]),
    ],
)
def test_bad_settings_name_themselves_and_the_remedy(settings, words):
    with pytest.raises(ValueError) as error:
        RolloutCorrection(**settings)
    for word in words:
        assert word in str(error.value)


def test_shapes_and_an_idle_mean_are_refused():
    old = torch.zeros(2, 3)
    config = RolloutCorrection(rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.1)
    for function in (rollout_correction_weights, rejection_mask, rollout_correction_metrics):
        with pytest.raises(ValueError, match="rollout_log_prob has shape"):
            function(old, old[:, :2], torch.ones(2, 3), config)
        with pytest.raises(ValueError, match="response_mask has shape"):
            function(old, old, torch.ones(2, 2), config)
    with pytest.raises(ValueError, match="rollout_is_batch_normalize=False"):
        rollout_correction_weights(old, old, torch.ones(2, 3), config, mean=1.0)
