"""Every policy loss: equality with verl 0.9.1, worked rows with value and gradient, and what the registry promises."""

import math
import warnings

import pytest
import torch
from goldens_io import FLOAT32, FLOAT64, cases, tensor

from grpo_ext import POLICY_LOSSES, BatchInfo, ObjectiveConfig, ppo_loss
from grpo_ext.objective import traits

FLOAT32_METRICS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")
LOSSES = [name for name in POLICY_LOSSES if ":" not in name and not name.startswith("test")]
DRO = {"dro": {"dro_beta": 0.5}}


def close(actual, expected, tolerance=FLOAT64):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), **tolerance
    )


def config(name: str, **settings) -> ObjectiveConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of aggregation modes, which have their own test
        return ObjectiveConfig(policy_loss=name, **{**DRO.get(name, {}), **settings})


# Equality with the reference


def inverted(thresholds):
    """verl's k1 bounds as bounds of the ratio in our direction (README, departure 18)."""
    return "_".join(repr(1 / float(bound)) for bound in reversed(thresholds.split("_")))


def golden_config(settings: dict) -> ObjectiveConfig:
    known = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "tau_pos", "tau_neg")
    chosen = {name: settings[name] for name in known if name in settings}
    if settings["loss_agg_mode"] == "seq-mean-token-sum-norm":
        chosen["loss_scale_factor"] = settings["loss_scale_factor"]
    for name, value in settings["policy_loss"].items():
        if name != "rollout_correction":
            chosen[name] = value
            continue
        correction = {"rollout_is": "sequence", **value}  # verl's default of the class
        chosen["bypass_loss_type"] = correction.pop("loss_type", "ppo_clip")
        if chosen["bypass_loss_type"] == "ppo_clip":  # weights that verl makes and does not use
            for unused in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"):
                correction.pop(unused, None)
        if correction.get("rollout_rs", "").endswith("k1"):
            correction["rollout_rs_threshold"] = inverted(correction["rollout_rs_threshold"])
        chosen |= correction
    return config(settings["loss_mode"], **chosen)


OTHERS = [case for case in cases("policy_loss") if case["settings"]["loss_mode"] != "vanilla"]


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in OTHERS])
def test_equals_the_reference(case):
    inputs, settings = case["inputs"], case["settings"]
    name = settings["loss_mode"]
    log_prob = tensor(inputs["log_prob"], grad=True)
    mask = tensor(inputs["response_mask"])
    rows = settings["global_batch_size"]
    if name == "geo_mean":
        # The reference averages over the micro-batch's rows, whatever the counts (README, departure 19)
        rows = len(mask)
    dp_size = 1 if name == "geo_mean" else settings["dp_size"]
    if "seed" in settings:
        torch.manual_seed(settings["seed"])
    loss, metrics = ppo_loss(
        log_prob,
        tensor(inputs["old_log_prob"]),
        tensor(inputs["advantages"]),
        mask,
        config=golden_config(settings),
        batch_info=BatchInfo(dp_size, settings["batch_num_tokens"], rows),
        rollout_is_weights=None if name == "bypass_mode" else tensor(inputs["rollout_is_weights"]),
    )
    loss.backward()
    close(loss.detach(), tensor(case["outputs"]["loss"]))
    close(log_prob.grad, tensor(case["outputs"]["grad_log_prob"]))
    recorded = {key: value for key, value in case["outputs"]["metrics"].items() if key.startswith("actor/")}
    for key, value in recorded.items():
        close(float(metrics[key]), tensor(value), FLOAT32 if key in FLOAT32_METRICS else FLOAT64)
    assert {key for key in metrics if key.startswith("actor/")} == {*recorded, "actor/pg_loss"}


# Worked rows: one per regime, loss and gradient with respect to log_prob


def one(name: str, log_ratio: float, advantage: float, *, old: float = -1.0, **settings):
    """Loss, gradient and metrics of a single token."""
    log_prob = torch.tensor([[old + log_ratio]], dtype=torch.float64, requires_grad=True)
    loss, metrics = ppo_loss(
        log_prob,
        torch.full((1, 1), old, dtype=torch.float64),
        torch.full((1, 1), advantage, dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
        config=config(name, **settings),
    )
    (grad,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), grad.item(), {key: float(value) for key, value in metrics.items()}


LN = math.log
TENTH = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}
WORKED = {
    # r = 1.1 is inside [0.9, 1.2]: -2 * 1.1, and d(-A r)/d log_prob = -A r
    "gspo inside": ("gspo", LN(1.1), 2.0, TENTH, -2.2, -2.2),
    # r = 1.5 is cut at 1.2: -2 * 1.2, no gradient
    "gspo above, A > 0": ("gspo", LN(1.5), 2.0, TENTH, -2.4, 0.0),
    # the penalty is kept: 2 * 1.5
    "gspo above, A < 0": ("gspo", LN(1.5), -2.0, TENTH, 3.0, 3.0),
    # the log ratio 12 is held at 10: 2 e^10, and the clamp has no gradient
    "gspo held at 10": ("gspo", 12.0, -2.0, TENTH, 2 * math.exp(10), 0.0),
    # r = 1: sigmoid(0) = 1/2, so -2 * 4/1 * 1/2 = -4; slope -A * 4 * 1/4 * r = -2, the clip's
    "sapo at 1, A > 0": ("sapo", 0.0, 2.0, {}, -4.0, -2.0),
    # tau = 2: 2 * 4/2 * 1/2 = 2; slope 2 * (4/2) * 2 * 1/4 = 2
    "sapo at 1, A < 0": ("sapo", 0.0, -2.0, {"tau_neg": 2.0}, 2.0, 2.0),
    # r = 1 + ln 3: sigmoid(ln 3) = 3/4, so -4 * 3/4 = -3; slope -4 * (3/4)(1/4) * r
    "sapo far": ("sapo", LN(1 + LN(3)), 1.0, {}, -3.0, -0.75 * (1 + LN(3))),
    # -A log_prob at log_prob = -1 + ln 2
    "gpg": ("gpg", LN(2), 3.0, {}, -3 * (-1 + LN(2)), -3.0),
    # the weight 1.5 is cut to 1.2 and the token keeps its gradient: -1.2 A
    "cispo above": ("cispo", LN(1.5), 2.0, TENTH, -2.4 * (-1 + LN(1.5)), -2.4),
    # the weight 0.5 is raised to 0.9
    "cispo below": ("cispo", LN(0.5), 2.0, TENTH, -1.8 * (-1 + LN(0.5)), -1.8),
    "cispo inside": ("cispo", LN(1.1), -2.0, TENTH, 2.2 * (-1 + LN(1.1)), 2.2),
    # p goes from 1/e = 0.368 to 0.736: above 0.2, left out
    "dppo_tv left out": ("dppo_tv", LN(2), 1.0, TENTH, 0.0, 0.0),
    # down by 0.184 with A < 0: beyond 0.1, left out
    "dppo_tv below, A < 0": ("dppo_tv", LN(0.5), -1.0, TENTH, 0.0, 0.0),
    # down by 0.184 with A > 0: back towards the old policy is free
    "dppo_tv below, A > 0": ("dppo_tv", LN(0.5), 1.0, TENTH, -0.5 * (-1 + LN(0.5)), -0.5),
    # r = 8 with A < 0 and p growing is free; the weight is held at c = 3
    "dppo_tv held at c": ("dppo_tv", LN(2.7), -1.0, {**TENTH, "clip_ratio_c": 1.5}, 1.5 * (-1 + LN(2.7)), 1.5),
    # p = 0.736: k = 0.368 (-0.693) + 0.632 ln(0.632 / 0.264) = 0.297 > 0.2, left out
    "dppo_kl left out": ("dppo_kl", LN(2), 1.0, TENTH, 0.0, 0.0),
    # p = 0.405: k = 0.0029 < 0.2
    "dppo_kl inside": ("dppo_kl", LN(1.1), 1.0, TENTH, -1.1 * (-1 + LN(1.1)), -1.1),
    # -(A log_prob - 0.5 * 0.5 * d^2), slope -(A - 0.5 d)
    "dro": ("dro", 2.0, 3.0, {}, -(3 * 1.0 - 0.25 * 4), -(3 - 1.0)),
    # d = 0.5 is cut at 0.2 for A > 0: -A e^0.2, no gradient
    "geo_mean above, A > 0": ("geo_mean", 0.5, 2.0, TENTH, -2 * math.exp(0.2), 0.0),
    # and not for A < 0
    "geo_mean above, A < 0": ("geo_mean", 0.5, -2.0, TENTH, 2 * math.exp(0.5), 2 * math.exp(0.5)),
    "geo_mean below, A < 0": ("geo_mean", -0.5, -2.0, TENTH, 2 * math.exp(-0.1), 0.0),
    # one token has covariance 0, between the bounds, so it is drawn: nothing is left
    "clip_cov drawn": ("clip_cov", 0.0, 2.0, {"clip_cov_lb": -1.0}, 0.0, 0.0),
    # above 0 there is no candidate: the clipped loss without the dual clip, -2 * 1.2
    "clip_cov none": ("clip_cov", LN(1.5), 2.0, TENTH, -2.4, 0.0),
    # the only token is the one held: -A r + 0.1 abs(d), slope -A r + 0.1 sign(d)
    "kl_cov": ("kl_cov", LN(2), 3.0, {}, -6 + 0.1 * LN(2), -6 + 0.1),
    "kl_cov below": ("kl_cov", LN(0.5), 3.0, {"ppo_kl_coef": 1.0}, -1.5 + LN(2), -1.5 - 1.0),
    # against the sampler: r = 5 with A = -2 meets the dual clip, 2 * 3
    "bypass ppo_clip": ("bypass_mode", LN(5), -2.0, {}, 6.0, 0.0),
    # the weight 5 is truncated at 2: -A * 2 * log_prob
    "bypass reinforce": (
        "bypass_mode",
        LN(5),
        -2.0,
        {"bypass_loss_type": "reinforce", "rollout_is": "token"},
        2 * 2 * (-1 + LN(5)),
        4.0,
    ),
    # the ratio 5 lies above 2: rejected
    "bypass rejected": (
        "bypass_mode",
        LN(5),
        -2.0,
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
        0.0,
        0.0,
    ),
}


@pytest.mark.parametrize("case", WORKED)
def test_worked_row(case):
    name, log_ratio, advantage, settings, loss, grad = WORKED[case]
    got_loss, got_grad, _ = one(name, log_ratio, advantage, **settings)
    close(got_loss, loss)
    close(got_grad, grad)


def test_gspo_has_one_ratio_per_row():
    """Two tokens of log ratio 0.2 and 0: both get e^0.1, each its own gradient."""
    log_prob = torch.tensor([[-0.8, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    loss, _ = ppo_loss(log_prob, old, torch.ones(1), torch.ones(1, 2), config=config("gspo", clip_ratio=0.2))
    loss.backward()
    close(loss.detach(), -math.exp(0.1))
    close(log_prob.grad, [[-math.exp(0.1) / 2] * 2])


def test_geo_mean_weighs_rows_by_the_geometric_mean():
    """Weights 4 and 1 make 2 for the row: -1 * 1 * 2."""
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    loss, _ = ppo_loss(
        zeros,
        zeros,
        torch.ones(1),
        torch.ones(1, 2),
        config=config("geo_mean"),
        rollout_is_weights=torch.tensor([[4.0, 1.0]], dtype=torch.float64),
    )
    close(loss, -2.0, {"rtol": 1e-9, "atol": 0})  # the 1e-10 inside the log


# What every loss promises


def example(rows=6, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(rows, width, generator=generator, dtype=torch.float64)  # noqa: E731
    log_prob = -draw().abs() - 0.1
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[1] = False
    return log_prob, log_prob + 0.4 * draw(), draw(), mask


def value_and_gradient(name, log_prob, old, advantages, mask, **more):
    log_prob = log_prob.clone().requires_grad_()
    settings = more.pop("settings", {})
    loss, metrics = ppo_loss(log_prob, old, advantages, mask, config=config(name, **settings), **more)
    loss.backward()
    return loss.detach(), log_prob.grad, metrics


WHOLE_STEP = {
    "clip_cov": {"clip_cov_lb": 0.0, "clip_cov_ratio": 0.2},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "bypass_mode": {"bypass_loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True},
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_outside_the_mask_is_never_read(name):
    log_prob, old, advantages, mask = example()
    settings = WHOLE_STEP.get(name, {})
    torch.manual_seed(1)
    loss, grad, _ = value_and_gradient(name, log_prob, old, advantages, mask, settings=settings)
    for garbage in (math.nan, 1e4, math.inf):
        torch.manual_seed(1)
        spoiled = [torch.where(mask, x, garbage) for x in (log_prob, old, advantages)]
        again, grad_again, metrics = value_and_gradient(name, *spoiled, mask, settings=settings)
        close(again, loss)
        close(torch.where(mask, grad_again, 0), grad)
        assert not grad_again[~mask].any()
        assert all(math.isfinite(float(m)) for m in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_to_train_on_is_0(name):
    log_prob, old, advantages, mask = example()
    loss, grad, metrics = value_and_gradient(name, log_prob, old, advantages, torch.zeros_like(mask))
    assert loss == 0 and not grad.any()
    assert all(float(m) == 0 for m in metrics.values() if m.extreme is None)


@pytest.mark.parametrize("name", LOSSES)
def test_one_step_is_the_sum_of_its_micro_batches(name):
    """With what looks at the whole step computed over the whole step."""
    from grpo_ext.objective import step_function

    log_prob, old, advantages, mask = example()
    settings = WHOLE_STEP.get(name, {})
    counts = BatchInfo(1, mask.sum(), len(mask))
    chosen = config(name, **settings)
    over_step = step_function(chosen)
    assert (over_step is not None) == (name in WHOLE_STEP)
    tensors = [torch.where(mask, x, 0) for x in (log_prob, old, advantages)]
    of_step = None
    if over_step is not None:
        of_step = over_step(*tensors, mask, config=chosen, generator=torch.Generator().manual_seed(3))
    whole, grad, metrics = value_and_gradient(
        name, log_prob, old, advantages, mask, settings=settings, batch_info=counts, of_step=of_step
    )
    assert grad.abs().max() > 0
    parts = [[0, 4], [1, 5], [3], [2]]
    total, sums = 0.0, {}
    for part in parts:
        loss, part_grad, part_metrics = value_and_gradient(
            name,
            log_prob[part],
            old[part],
            advantages[part],
            mask[part],
            settings=settings,
            batch_info=counts,
            of_step=None if of_step is None else of_step[part],
        )
        total = total + loss
        close(part_grad, grad[part])
        for key, metric in part_metrics.items():
            sums.setdefault(key, []).append(metric)
    close(total, whole)
    for key, values in sums.items():
        if values[0].extreme is None and not values[0].share:
            count = float(sum(metric.count for metric in values))
            expected = float(metrics[key].total) / max(float(metrics[key].count), 1)
            close(float(sum(metric.total for metric in values)) / max(count, 1), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_a_row_without_advantage_moves_nothing_where_the_registry_says_so(name):
    log_prob, old, advantages, mask = example()
    advantages[3] = 0
    _, grad, _ = value_and_gradient(name, log_prob, old, advantages, mask, settings=WHOLE_STEP.get(name, {}))
    moved = bool(grad[3].any())
    if traits(name).proportional_to_advantage:
        assert not moved
    elif name == "dro":
        assert moved


def test_the_draw_is_seeded():
    from grpo_ext.objective import step_function

    log_prob, old, advantages, mask = example(rows=40)
    chosen = config("clip_cov", clip_cov_lb=0.0, clip_cov_ratio=0.1)
    tensors = [torch.where(mask, x, 0) for x in (log_prob, old, advantages)]

    def draw(seed):
        return step_function(chosen)(*tensors, mask, config=chosen, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert (draw(1) == 0).sum() == int(0.1 * mask.sum())


# Bad input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy_loss": "gspoo"}, "gspo"),
        ({"policy_loss": "dro"}, "dro_beta"),
        ({"policy_loss": "dro", "dro_beta": 0.0}, "dro_beta=0.0 must be a finite number > 0"),
        ({"dro_beta": 0.1}, "dro_beta=0.1 has no effect with policy_loss='vanilla'; set policy_loss='dro'"),
        ({"tau_pos": 2.0}, "policy_loss='sapo'"),
        ({"policy_loss": "kl_cov", "clip_cov_lb": 0.5}, "policy_loss='clip_cov'"),
        ({"bypass_loss_type": "reinforce"}, "policy_loss='bypass_mode'"),
        ({"policy_loss": "bypass_mode", "bypass_loss_type": "ppo"}, "ppo_clip, reinforce"),
        ({"policy_loss": "bypass_mode", "rollout_is": "token"}, "bypass_loss_type='reinforce'"),
        ({"policy_loss": "sapo", "tau_neg": -1.0}, "tau_neg=-1.0"),
        ({"policy_loss": "clip_cov", "clip_cov_lb": 6.0}, "below clip_cov_ub=5.0"),
        ({"policy_loss": "clip_cov", "clip_cov_ratio": 2.0}, "at most 1"),
        ({"policy_loss": "kl_cov", "ppo_kl_coef": math.nan}, "ppo_kl_coef=nan"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_setting_that_cannot_be_meant_is_refused(settings, words):
    with pytest.raises(ValueError) as error:
        ObjectiveConfig(**settings)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy_loss": "gspo"}, "meant with loss_agg_mode='seq-mean-token-mean'; 'token-mean' is set"),
        ({"policy_loss": "cispo", "loss_agg_mode": "token-sum"}, "meant with loss_agg_mode='token-mean'"),
        ({"policy_loss": "sapo"}, "always reduced by 'seq-mean-token-mean'"),
        ({"policy_loss": "gpg", "clip_ratio_high": 0.28}, "does not read clip_ratio_high=0.28"),
    ],
)
def test_a_setting_that_is_not_followed_is_told(settings, words):
    with pytest.warns(UserWarning) as warned:
        ObjectiveConfig(**settings)
    assert words in str(warned[0].message)


def test_weights_for_a_loss_that_makes_its_own_are_refused():
    log_prob, old, advantages, mask = example()
    with pytest.raises(ValueError, match="makes its own weights"):
        value_and_gradient("bypass_mode", log_prob, old, advantages, mask, rollout_is_weights=torch.ones(6, 5))
