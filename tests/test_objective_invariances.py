"""What must not matter does not: garbage outside the mask, the split into micro-batches, the order of rows."""

import math
import subprocess
import sys

import pytest
import torch

from grpo_ext import (
    KL_PENALTIES,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    BatchInfo,
    ObjectiveConfig,
    agg_loss,
    grpo_advantage,
    kl_penalty,
    ppo_loss,
    register_policy_loss,
)

B, T = 8, 6
TOL = {"rtol": 1e-12, "atol": 1e-13}


def batch(seed: int = 0, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Uneven rows, one of them wholly masked, one with a hole, ratios on every side of the clip."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(B, T, generator=generator, dtype=torch.float64).to(dtype)

    lengths = torch.tensor([6, 1, 4, 0, 6, 2, 5, 3])
    mask = (torch.arange(T) < lengths[:, None]).long()
    mask[2, 1] = 0  # a tool's output
    old = -draw().abs()
    return {
        "log_prob": old + 0.5 * draw(),
        "old_log_prob": old,
        "advantages": draw()[:, :1].expand(B, T).clone(),
        "response_mask": mask,
        "entropy": draw().abs(),
        "ref_log_prob": old + 0.3 * draw(),
        "rollout_is_weights": draw().abs(),
    }


def config(mode: str, **settings) -> ObjectiveConfig:
    if mode == "seq-mean-token-sum-norm":
        settings.setdefault("loss_scale_factor", 16)
    return ObjectiveConfig(
        loss_agg_mode=mode,
        **{"entropy_coeff": 0.3, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3+", **settings},
    )


COUNTS = BatchInfo(1, 27, B)


def gradients(rows: dict, objective: ObjectiveConfig, info: BatchInfo | None = COUNTS):
    """Loss, gradients with respect to log-probs and entropy, and metrics."""
    rows = dict(rows)
    rows["log_prob"] = rows["log_prob"].detach().clone().requires_grad_()
    rows["entropy"] = rows["entropy"].detach().clone().requires_grad_()
    loss, metrics = ppo_loss(**rows, config=objective, batch_info=info)
    loss.backward()
    entropy_grad = torch.zeros_like(rows["entropy"]) if rows["entropy"].grad is None else rows["entropy"].grad
    return loss.detach(), rows["log_prob"].grad, entropy_grad, metrics


def test_counts_of_the_fixture():
    assert int(batch()["response_mask"].sum()) == 26
    # COUNTS differs from it on purpose: the denominators are arguments


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("garbage", [1e4, -1e4, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("info", [None, COUNTS])
def test_garbage_outside_the_mask_reaches_nothing(mode, garbage, info):
    clean = batch()
    dirty = {
        name: value if name == "response_mask" else torch.where(clean["response_mask"].bool(), value, garbage)
        for name, value in clean.items()
    }
    expected, actual = gradients(clean, config(mode), info), gradients(dirty, config(mode), info)
    for a, b in zip(actual[:3], expected[:3], strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, **TOL)
    assert not actual[1][~clean["response_mask"].bool()].any()
    assert {k: float(v) for k, v in actual[3].items()} == {k: float(v) for k, v in expected[3].items()}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up_to_the_whole(mode, size):
    rows = batch()
    loss, grad, entropy_grad, _ = gradients(rows, config(mode))
    parts = [
        gradients({name: value[i : i + size] for name, value in rows.items()}, config(mode)) for i in range(0, B, size)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), loss, **TOL)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad, **TOL)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), entropy_grad, **TOL)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_ranks_average_to_the_whole(mode):
    """Two ranks with `dp_size=2`, averaged as DDP averages, equal one rank with all rows."""
    rows = batch()
    loss, grad, _, _ = gradients(rows, config(mode))
    info = BatchInfo(2, COUNTS.batch_num_tokens, COUNTS.global_batch_size)
    ranks = [gradients({k: v[i : i + 4] for k, v in rows.items()}, config(mode), info) for i in (0, 4)]
    torch.testing.assert_close((ranks[0][0] + ranks[1][0]) / 2, loss, **TOL)
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]) / 2, grad, **TOL)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_row_order_and_padding_do_not_matter(mode):
    rows = batch()
    loss, grad, _, _ = gradients(rows, config(mode))
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    moved = {name: torch.nn.functional.pad(value[order], (0, 5)) for name, value in rows.items()}
    moved_loss, moved_grad, _, _ = gradients(moved, config(mode))
    torch.testing.assert_close(moved_loss, loss, **TOL)
    torch.testing.assert_close(moved_grad[:, :T], grad[order], **TOL)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("info", [None, BatchInfo(4, 10, 3), BatchInfo(1, 0, 0)])
def test_a_micro_batch_without_a_valid_token_is_zero_and_attached(mode, info):
    rows = batch()
    rows["response_mask"] = torch.zeros(B, T)
    loss, grad, entropy_grad, metrics = gradients(rows, config(mode), info)
    assert loss.item() == 0.0
    assert not grad.any() and not entropy_grad.any()
    assert all(math.isfinite(float(value)) for value in metrics.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(dtype):
    rows = {name: v if name == "response_mask" else v.to(dtype) for name, v in batch().items()}
    wide = {name: v if name == "response_mask" else v.float() for name, v in rows.items()}
    loss, _ = ppo_loss(**rows, config=config("token-mean"), batch_info=COUNTS)
    expected, _ = ppo_loss(**wide, config=config("token-mean"), batch_info=COUNTS)
    assert loss.dtype == torch.float32
    assert loss.item() == expected.item()
    assert kl_penalty(rows["log_prob"], rows["ref_log_prob"], "k3").dtype == torch.float32
    assert agg_loss(rows["log_prob"], rows["response_mask"], "token-mean").dtype == torch.float32


def test_expected_kl_by_enumeration():
    """Over a small vocabulary k1 and k3 have mean KL; only k2's (and every `+`) gradient has mean grad KL."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(5, generator=generator, dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    weights = policy.exp().detach()
    exact = (policy.exp() * (policy - reference)).sum()
    exact_grad = torch.autograd.grad(exact, logits, retain_graph=True)[0]

    def mean_value_and_gradient(name):
        estimate = (weights * kl_penalty(policy[None], reference[None], name)[0]).sum()
        return estimate.item(), torch.autograd.grad(estimate, logits, retain_graph=True)[0]

    for name in KL_PENALTIES:
        value, gradient = mean_value_and_gradient(name)
        if name.removesuffix("+") in ("kl", "k1", "low_var_kl", "k3"):
            assert value == pytest.approx(exact.item(), rel=1e-12), name
        unbiased = name.endswith("+") or name in ("mse", "k2")
        assert torch.allclose(gradient, exact_grad, rtol=1e-10, atol=1e-12) == unbiased, name
    assert mean_value_and_gradient("k1")[1].abs().max() < 1e-12  # its mean gradient is 0: it trains nothing


# Registry


def test_a_registered_loss_goes_through_the_assembly():
    @register_policy_loss("test_reinforce")
    def reinforce(log_prob, old_log_prob, advantages, response_mask, *, config):
        return -advantages * log_prob, {"actor/test": log_prob}

    try:
        rows = batch()
        loss, metrics = ppo_loss(
            rows["log_prob"],
            rows["old_log_prob"],
            rows["advantages"],
            rows["response_mask"],
            config=ObjectiveConfig(policy_loss="test_reinforce"),
        )
        mask = rows["response_mask"].bool()
        expected = (-rows["advantages"] * rows["log_prob"])[mask].mean()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        assert float(metrics["actor/test"]) == pytest.approx(rows["log_prob"][mask].mean().item(), rel=1e-12)
        with pytest.raises(ValueError, match="test_reinforce.*already registered"):
            register_policy_loss("test_reinforce")(reinforce)
    finally:
        del POLICY_LOSSES["test_reinforce"]


def test_a_registered_loss_that_reduces_is_refused():
    @register_policy_loss("test_reduced")
    def reduced(log_prob, old_log_prob, advantages, response_mask, *, config):
        return log_prob.mean()

    try:
        rows = batch()
        with pytest.raises(ValueError, match="test_reduced.*one loss per token"):
            ppo_loss(
                rows["log_prob"],
                rows["old_log_prob"],
                rows["advantages"],
                rows["response_mask"],
                config=ObjectiveConfig(policy_loss="test_reduced"),
            )
    finally:
        del POLICY_LOSSES["test_reduced"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss: loss.detach(), "without a gradient; do not detach log_prob"),
        (lambda loss: 0.5, "returned a float, expected a tensor of shape"),
        (lambda loss: [loss, {}], "returned a list"),
        (lambda loss: (loss, None), "metrics as a NoneType"),
        (lambda loss: (loss, {"actor/x": 1.0}), "metric 'actor/x' as a float"),
        (lambda loss: (loss, {"actor/x": loss.detach()[0]}), r"metric 'actor/x' as shape \(6,\)"),
        (lambda loss: (loss, {3: loss.detach()}), "metric 3"),
    ],
)
def test_what_a_registered_loss_returns_is_checked(change, message):
    register_policy_loss("test_wrong")(lambda log_prob, *args, config: change(-log_prob))
    try:
        rows = batch()
        with pytest.raises(ValueError, match=f"policy loss 'test_wrong' returned .*{message}|test_wrong.*{message}"):
            ppo_loss(
                rows["log_prob"].requires_grad_(),
                rows["old_log_prob"],
                rows["advantages"],
                rows["response_mask"],
                config=ObjectiveConfig(policy_loss="test_wrong"),
            )
    finally:
        del POLICY_LOSSES["test_wrong"]


@pytest.mark.parametrize("name", [3, None, "", " ", ["x"], lambda *args: None])
def test_a_policy_loss_needs_a_name(name):
    with pytest.raises(TypeError, match=r"@register_policy_loss\(\"name\"\)"):
        register_policy_loss(name)


def test_huge_rewards_do_not_overflow():
    rewards = torch.tensor([1e30, 0.0, 0.0, 1e30])
    advantages = grpo_advantage(rewards, 4)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254], rel=1e-6)


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_ratio_c": 1.0}, r"clip_ratio_c=1.0 must be greater than 1"),
        ({"clip_ratio_c": 0.5}, r"clip_ratio_c=0.5"),
        ({"clip_ratio_c": math.nan}, r"clip_ratio_c=nan"),
        ({"clip_ratio": -0.1}, r"clip_ratio=-0.1"),
        ({"clip_ratio": None}, r"clip_ratio=None"),
        ({"clip_ratio_low": -0.2}, r"clip_ratio_low=-0.2"),
        ({"clip_ratio_high": -0.28}, r"clip_ratio_high=-0.28"),
        ({"clip_ratio_high": "0.28"}, r"clip_ratio_high='0.28'"),
        ({"policy_loss": "ppo"}, r"policy_loss='ppo' is unknown; choose one of vanilla"),
        ({"kl_loss_type": "k4"}, r"kl_loss_type='k4' is unknown; choose one of kl, kl\+, k1"),
        ({"loss_agg_mode": "mean"}, r"loss_agg_mode='mean' is unknown; choose one of token-mean, seq-mean-token-sum"),
        ({"loss_scale_factor": 0, "loss_agg_mode": "seq-mean-token-sum-norm"}, r"loss_scale_factor=0 must be"),
        ({"loss_scale_factor": 512}, r"loss_scale_factor=512 has no effect with loss_agg_mode='token-mean'"),
        ({"kl_loss_coef": 0.05}, r"kl_loss_coef=0.05 has no effect with use_kl_loss=False"),
        ({"kl_loss_coef": -1.0, "use_kl_loss": True}, r"kl_loss_coef=-1.0"),
        ({"entropy_coeff": math.inf}, r"entropy_coeff=inf"),
    ],
)
def test_bad_settings_are_refused_with_value_and_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**settings)


def test_bad_tensors_are_refused():
    rows = batch()
    old, advantages, mask = rows["old_log_prob"], rows["advantages"], rows["response_mask"]
    with pytest.raises(ValueError, match=r"old_log_prob has shape \(8, 5\), expected \(8, 6\)"):
        ppo_loss(rows["log_prob"], old[:, :5], advantages, mask, config=ObjectiveConfig())
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\)"):
        ppo_loss(rows["log_prob"], old, torch.ones(3), mask, config=ObjectiveConfig())
    with pytest.raises(ValueError, match="needs ref_log_prob"):
        ppo_loss(rows["log_prob"], old, advantages, mask, config=ObjectiveConfig(use_kl_loss=True))
    with pytest.raises(ValueError, match="dp_size=2.*needs batch_num_tokens"):
        agg_loss(old, mask, "token-mean", dp_size=2)
    with pytest.raises(ValueError, match="dp_size=2.*needs global_batch_size"):
        agg_loss(old, mask, "seq-mean-token-sum", dp_size=2, batch_num_tokens=5)
    with pytest.raises(ValueError, match="kl_penalty='full' is unknown"):
        kl_penalty(old, old, "full")


# The room's walls


def test_the_objective_imports_torch_only_and_quickly():
    """No other third-party module, and under a second beyond torch itself."""
    script = """
import sys, time
import torch
torch_modules = set(sys.modules)
start = time.perf_counter()
import grpo_ext.objective
print(time.perf_counter() - start)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - torch_modules}))
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    seconds, modules = output.splitlines()
    assert float(seconds) < 1.0
    assert set(modules.split()) <= {"grpo_ext", *sys.stdlib_module_names}
