"""The objective on rows worked by hand, one per regime, value and gradient, with the arithmetic on the page."""

import math

import pytest
import torch

from grpo_ext import BatchInfo, ObjectiveConfig, agg_loss, grpo_advantage, kl_penalty, ppo_loss

TOL = {"rel": 1e-9, "abs": 1e-12}


def one_token(advantage: float, ratio: float, **settings):
    """Loss, gradient with respect to the log-prob and metrics of a single token with the given ratio."""
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    log_prob = (old + math.log(ratio)).requires_grad_()
    loss, metrics = ppo_loss(
        log_prob,
        old,
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.ones(1, 1),
        config=ObjectiveConfig(**settings),
    )
    loss.backward()
    return loss.item(), log_prob.grad.item(), {name: float(value) for name, value in metrics.items()}


# d(-A r)/d log_prob = -A r, since dr/dlog_prob = r; inside a flat part of the clip it is 0.
@pytest.mark.parametrize(
    ("advantage", "ratio", "settings", "loss", "gradient", "clipped", "lower"),
    [
        # on-policy: -A
        (1.5, 1.0, {}, -1.5, -1.5, 0, 0),
        # A > 0, inside [0.8, 1.2]: -2 * 1.1 = -2.2
        (2.0, 1.1, {}, -2.2, -2.2, 0, 0),
        # A > 0, above: 1.5 A becomes 1.2 A and is flat
        (1.0, 1.5, {}, -1.2, 0.0, 1, 0),
        # Clip-Higher: the same ratio 1.25 is cut at 1.2 but not at 1.28
        (1.0, 1.25, {}, -1.2, 0.0, 1, 0),
        (1.0, 1.25, {"clip_ratio_high": 0.28}, -1.25, -1.25, 0, 0),
        # A > 0, below: max(-0.5, -0.8) = -0.5, the gradient that raises the token is kept
        (1.0, 0.5, {}, -0.5, -0.5, 0, 0),
        # A < 0, above: max(1.5, 1.2) = 1.5, the penalty is kept
        (-1.0, 1.5, {}, 1.5, 1.5, 0, 0),
        # A < 0, below: max(0.5, 0.8) = 0.8, flat
        (-1.0, 0.5, {}, 0.8, 0.0, 1, 0),
        # low is low: a lower bound of 0.6 keeps ratio 0.7
        (-1.0, 0.7, {"clip_ratio_low": 0.4}, 0.7, 0.7, 0, 0),
        # dual-clip: A = -2, r = 5: max(10, 2.4) = 10, cut at -A * 3 = 6, flat
        (-2.0, 5.0, {}, 6.0, 0.0, 0, 1),
        # c = 10: -A * 10 = 20 cuts nothing
        (-2.0, 5.0, {"clip_ratio_c": 10.0}, 10.0, 10.0, 0, 0),
        # dual-clip never touches A > 0
        (2.0, 5.0, {}, -2.4, 0.0, 1, 0),
    ],
)
def test_vanilla_regimes(advantage, ratio, settings, loss, gradient, clipped, lower):
    value, slope, metrics = one_token(advantage, ratio, **settings)
    assert value == pytest.approx(loss, **TOL)
    assert slope == pytest.approx(gradient, **TOL)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, **TOL)
    assert metrics["actor/pg_clipfrac"] == clipped
    assert metrics["actor/pg_clipfrac_lower"] == lower
    # k1 estimate of KL(old || policy): old - new = -log(ratio)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio), **TOL)


def test_ratio_is_clamped_before_exp_so_a_huge_gap_is_flat_and_finite():
    old = torch.tensor([[-90.0, -1.0]], dtype=torch.float64)
    log_prob = torch.tensor([[-1.0, -90.0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
    loss, metrics = ppo_loss(
        log_prob,
        old,
        advantages,
        torch.ones(1, 2),
        config=ObjectiveConfig(clip_ratio_c=1e12, loss_agg_mode="token-sum"),
    )
    loss.backward()
    # gaps +89 and -89 become +20 and -20: loss e^20 for A = -1, -e^-20 for A = 1
    assert loss.item() == pytest.approx(math.exp(20) - math.exp(-20), rel=1e-12)
    assert log_prob.grad.tolist() == [[0.0, 0.0]]
    assert float(metrics["actor/ppo_kl"]) == 0.0  # -20 and +20


# d = log_prob - ref = 0.5: k1 0.5; abs 0.5; k2 0.125; k3 e^-0.5 + 0.5 - 1; their slopes 1, 1, d, 1 - e^-d
K3 = math.exp(-0.5) - 0.5


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [
        ("kl", 0.5, 1.0),
        ("k1", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("mse", 0.125, 0.5),
        ("k2", 0.125, 0.5),
        ("low_var_kl", K3, 1 - math.exp(-0.5)),
        ("k3", K3, 1 - math.exp(-0.5)),
        ("kl+", 0.5, 0.5),
        ("k1+", 0.5, 0.5),
        ("abs+", 0.5, 0.5),
        ("mse+", 0.125, 0.5),
        ("k2+", 0.125, 0.5),
        ("low_var_kl+", K3, 0.5),
        ("k3+", K3, 0.5),
    ],
)
def test_kl_estimators(name, value, slope):
    log_prob = torch.tensor([[-0.5]], dtype=torch.float64, requires_grad=True)
    estimate = kl_penalty(log_prob, torch.tensor([[-1.0]], dtype=torch.float64), name)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, **TOL)
    assert log_prob.grad.item() == pytest.approx(slope, **TOL)


@pytest.mark.parametrize("d", [-3.0, 12.0, -30.0])
def test_k3_is_flat_outside_its_clamps(d):
    # k3(-3) = e^3 - 3 - 1 = 16.1 and k3(12) = e^-12 + 12 - 1 = 11.0 are cut at 10; -30 is cut at the log ratio first
    log_prob = torch.tensor([[d]], dtype=torch.float64, requires_grad=True)
    estimate = kl_penalty(log_prob, torch.zeros(1, 1, dtype=torch.float64), "k3")
    estimate.sum().backward()
    assert estimate.item() == 10.0
    assert log_prob.grad.item() == 0.0


# Row A: 8 tokens of loss 1; row B: 2 tokens of loss 5.
LOSS = torch.tensor([[1.0] * 8, [5.0] * 2 + [7e7] * 6], dtype=torch.float64)
MASK = torch.tensor([[1] * 8, [1] * 2 + [0] * 6])


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("token-mean", 1.8),  # (8 + 10) / 10
        ("seq-mean-token-sum", 9.0),  # (8 + 10) / 2
        ("seq-mean-token-sum-norm", 1.125),  # 9 / 8, T = 8
        ("seq-mean-token-mean", 3.0),  # (1 + 5) / 2
        ("token-sum", 18.0),
    ],
)
def test_aggregation_worked_example(mode, value):
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(value, **TOL)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        # counts of a step of 20 tokens and 4 rows on 2 ranks; the factor 2 undoes the ranks' averaging
        ("token-mean", 2 * 18 / 20),
        ("seq-mean-token-sum", 2 * 18 / 4),
        ("seq-mean-token-sum-norm", 2 * 18 / 4 / 16),
        ("seq-mean-token-mean", 2 * 6 / 4),
        ("token-sum", 2 * 18),
    ],
)
def test_aggregation_with_counts_over_the_step(mode, value):
    scale = {"loss_scale_factor": 16} if mode.endswith("norm") else {}
    share = agg_loss(LOSS, MASK, mode, dp_size=2, batch_num_tokens=20, global_batch_size=4, **scale)
    assert share.item() == pytest.approx(value, **TOL)


def test_assembly_signs():
    """loss = pg - entropy_coeff * entropy + kl_loss_coef * kl, each term aggregated alike."""
    old = torch.full((1, 2), -1.0, dtype=torch.float64)
    log_prob = old.clone().requires_grad_()
    entropy = torch.tensor([[2.0, 4.0]], dtype=torch.float64, requires_grad=True)
    loss, metrics = ppo_loss(
        log_prob,
        old,
        torch.tensor([1.0], dtype=torch.float64),
        torch.ones(1, 2),
        config=ObjectiveConfig(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2"),
        entropy=entropy,
        ref_log_prob=old - 0.4,
    )
    loss.backward()
    # pg: -1; entropy mean 3; k2 of 0.4: 0.08; -1 - 0.1 * 3 + 0.5 * 0.08 = -1.26
    assert loss.item() == pytest.approx(-1.26, **TOL)
    # per token, over 2 tokens: (-1 + 0.5 * 0.4) / 2 and -0.1 / 2
    assert log_prob.grad.tolist() == [[pytest.approx(-0.4, **TOL)] * 2]
    assert entropy.grad.tolist() == [[pytest.approx(-0.05, **TOL)] * 2]
    assert {name: float(value) for name, value in metrics.items()} == {
        "actor/pg_loss": pytest.approx(-1.0, **TOL),
        "actor/pg_clipfrac": 0.0,
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": pytest.approx(0.0, abs=1e-12),
        "actor/entropy_loss": pytest.approx(3.0, **TOL),
        "actor/kl_loss": pytest.approx(0.08, **TOL),
        "actor/kl_coef": pytest.approx(0.5, **TOL),
    }


def test_rollout_weights_touch_the_policy_term_only():
    old = torch.full((2, 1), -1.0, dtype=torch.float64)
    loss, metrics = ppo_loss(
        old.clone().requires_grad_(),
        old,
        torch.tensor([1.0, -2.0], dtype=torch.float64),
        torch.ones(2, 1),
        config=ObjectiveConfig(entropy_coeff=1.0, use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k2"),
        entropy=torch.ones(2, 1, dtype=torch.float64),
        ref_log_prob=old - 1,
        rollout_is_weights=torch.tensor([[3.0], [0.5]], dtype=torch.float64),
    )
    # pg: (-1 * 3 + 2 * 0.5) / 2 = -1; entropy 1; kl 0.5
    assert float(metrics["actor/pg_loss"]) == pytest.approx(-1.0, **TOL)
    assert loss.item() == pytest.approx(-1.0 - 1.0 + 0.5, **TOL)


def test_entropy_is_reported_with_coefficient_zero():
    old = torch.full((1, 1), -1.0)
    loss, metrics = ppo_loss(
        old, old, torch.ones(1), torch.ones(1, 1), config=ObjectiveConfig(), entropy=torch.full((1, 1), 2.0)
    )
    assert float(metrics["actor/entropy_loss"]) == 2.0
    assert loss.item() == -1.0
    assert "actor/kl_loss" not in metrics and "actor/kl_coef" not in metrics


def test_grpo_advantage_by_hand():
    # rewards 1, 0, 0, 1: mean 0.5, squares 4 * 0.25 / 3 -> std 0.57735
    std = math.sqrt(1 / 3)
    expected = [0.5 / (std + 1e-6), -0.5 / (std + 1e-6), -0.5 / (std + 1e-6), 0.5 / (std + 1e-6)]
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert grpo_advantage(rewards, 4).tolist() == pytest.approx(expected, **TOL)
    plain = grpo_advantage(rewards, 4, norm_adv_by_std_in_grpo=False)
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_grpo_advantage_of_equal_rewards_is_exactly_zero():
    # the float32 mean of eight 0.7 is not 0.7; verl makes up to 0.056 of it
    assert grpo_advantage(torch.full((8,), 0.7), 8).tolist() == [0.0] * 8


def test_grpo_advantage_leaves_rows_without_a_reward_out():
    nan = math.nan
    rewards = torch.tensor([1.0, nan, 0.0, nan, nan, nan, 3.0, nan], dtype=torch.float64)
    # group 1: 1 and 0, mean 0.5, std sqrt(0.5); group 2: one scored row has nothing to compare with
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert grpo_advantage(rewards, 4).tolist() == pytest.approx([a, 0, -a, 0, 0, 0, 0, 0], **TOL)


def test_batch_info_counts_make_shares_add_up():
    torch.manual_seed(0)
    log_prob = torch.randn(4, 5, dtype=torch.float64)
    old = log_prob + 0.3 * torch.randn(4, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    advantages = torch.randn(4, dtype=torch.float64)
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean", "token-sum"):
        config = ObjectiveConfig(loss_agg_mode=mode)
        info = BatchInfo(dp_size=1, batch_num_tokens=8, global_batch_size=4)
        whole, _ = ppo_loss(log_prob, old, advantages, mask, config=config, batch_info=info)
        parts = sum(
            ppo_loss(log_prob[i:j], old[i:j], advantages[i:j], mask[i:j], config=config, batch_info=info)[0]
            for i, j in ((0, 1), (1, 4))
        )
        assert parts.item() == pytest.approx(whole.item(), **TOL), mode
