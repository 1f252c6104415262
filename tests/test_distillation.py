"""On-policy distillation: verl's recorded numbers, hand-worked rows, the top-k head, teachers."""

import warnings

import pytest
import torch
from goldens_io import FLOAT32, FLOAT64, cases, tensor

from grpo_ext import BatchInfo, ObjectiveConfig
from grpo_ext.objective import distillation as module
from grpo_ext.objective.distillation import (
    DistillationConfig,
    TopKScores,
    TopKTokens,
    distillation_ppo_loss,
    forward_kl_topk,
)

# Where the reference itself computes in float32.
FLOAT32_METRICS = ("pg_clipfrac", "pg_clipfrac_lower", "overlap_ratio")


def close(actual, expected, tolerance=FLOAT64):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), **tolerance
    )


def named(all_cases):
    return [pytest.param(case, id=case["name"]) for case in all_cases]


def quiet_config(**settings) -> DistillationConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return DistillationConfig(**settings)


# Equality with verl


def distillation_config(settings: dict, **changes) -> DistillationConfig:
    chosen = {
        "distillation_loss_mode": settings["loss_mode"],
        "use_task_rewards": settings["use_task_rewards"],
        "use_policy_gradient": settings["use_policy_gradient"],
        "distillation_loss_coef": settings["distillation_loss_coef"],
        "distillation_loss_max_clamp": settings["loss_max_clamp"],
    }
    for name in ("topk", "clip_ratio_low", "clip_ratio_high"):
        if name in settings:
            chosen[f"distillation_{name}"] = settings[name]
    return quiet_config(**{**chosen, **changes})


def objective_config(settings: dict) -> ObjectiveConfig:
    chosen = dict(settings["actor"])
    if chosen["loss_agg_mode"] == "seq-mean-token-sum-norm":
        chosen["loss_scale_factor"] = settings["loss_scale_factor"]
    return ObjectiveConfig(**chosen)


ALL = cases("distillation")
ASSEMBLED = [case for case in ALL if not case["name"].startswith("topk_tokens")]
TOKENS = [case for case in ALL if case["name"].startswith("topk_tokens")]


def test_every_recorded_case_is_compared():
    assert len(ASSEMBLED) + len(TOKENS) == len(ALL) == 47


@pytest.mark.parametrize("case", named(ASSEMBLED))
def test_assembly(case, monkeypatch):
    """Each micro-batch of each recorded optimizer step: loss, gradients, every metric."""
    inputs, settings = case["inputs"], case["settings"]
    changes = {}
    if not settings["use_task_rewards"] and settings["distillation_loss_coef"] != 1:
        with pytest.raises(ValueError, match="distillation_loss_coef=0.25 has no effect"):
            distillation_config(settings)  # verl ignores it: the numbers are those of 1
        changes["distillation_loss_coef"] = 1.0
    if settings["loss_mode"] == "kl" and not settings["use_policy_gradient"]:
        with pytest.raises(ValueError, match="ignores the teacher"):
            distillation_config(settings)  # verl refuses it under its other name only
        monkeypatch.setattr(module, "REFERENCE_FREE_GRADIENT", ())
    distillation = distillation_config(settings, **changes)
    for part in case["outputs"]["micro_batches"]:

        def take(name, *, grad=False, rows=part["rows"]):
            values = tensor(inputs.get(name))
            return None if values is None else values[rows].clone().requires_grad_(grad)

        log_prob, losses, topk = take("log_prob", grad=True), take("distillation_losses", grad=True), None
        if losses is not None:
            recorded = TopKTokens(losses, *(take(name) for name in TopKTokens._fields[1:]))
            monkeypatch.setattr(module, "forward_kl_topk", lambda *args, recorded=recorded, **kwargs: recorded)
            topk = TopKScores(*(torch.zeros(*losses.shape, settings["topk"]) for _ in range(2)))
        loss, metrics = distillation_ppo_loss(
            log_prob,
            take("old_log_prob"),
            take("advantages"),
            take("response_mask"),
            config=objective_config(settings),
            distillation=distillation,
            batch_info=BatchInfo(settings["dp_size"], settings["batch_num_tokens"], settings["global_batch_size"]),
            teacher_log_prob=take("teacher_log_prob"),
            topk=topk,
        )
        loss.backward()
        close(loss.detach(), tensor(part["loss"]))
        for leaf, expected in ((log_prob, "grad_log_prob"), (losses, "grad_distillation_losses")):
            if leaf is not None:
                expected = tensor(part[expected])
                close(
                    torch.zeros_like(leaf) if leaf.grad is None else leaf.grad,
                    torch.zeros_like(leaf) if expected is None else expected,
                )
        shown = {name: metric["value"] for name, metric in part["metrics"].items()}
        for name, value in shown.items():
            tolerance = FLOAT32 if name.rpartition("/")[2] in FLOAT32_METRICS else FLOAT64
            close(float(metrics[name]), tensor(value), tolerance)
        assert set(shown) == set(metrics)


@pytest.mark.parametrize("case", named(TOKENS))
def test_topk_tokens(case):
    inputs, outputs = case["inputs"], case["outputs"]
    logits, ids = tensor(inputs["student_logits"], grad=True), torch.tensor(inputs["teacher_topk_ids"])
    own = logits.detach().topk(ids.shape[-1], dim=-1).indices
    tokens = forward_kl_topk(
        logits.log_softmax(-1).gather(-1, ids),
        tensor(inputs["teacher_topk_log_probs"]),
        log_prob_min_clamp=case["settings"]["log_prob_min_clamp"],
        overlap=(ids[..., None] == own[..., None, :]).any(-1),
    )
    (tokens.loss * tensor(inputs["weights"])).sum().backward()
    close(tokens.loss.detach(), tensor(outputs["distillation_losses"]), FLOAT32)
    close(logits.grad, tensor(outputs["grad_student_logits"]), FLOAT32)
    tolerance = FLOAT32 if case["name"].endswith("chunked") else FLOAT64
    for name in TopKTokens._fields[1:]:
        close(getattr(tokens, name), tensor(outputs[name]), tolerance)


# By hand: one row per regime, value and gradient

T = torch.float64


def row(*values, grad=False):
    return torch.tensor([values], dtype=T).requires_grad_(grad)


def one_row(log_prob, teacher, **settings):
    """Loss and gradient of on-policy tokens with advantage 0, distillation alone."""
    student = row(*log_prob, grad=True)
    loss, metrics = distillation_ppo_loss(
        student,
        student.detach(),
        torch.zeros_like(student),
        torch.ones_like(student),
        config=ObjectiveConfig(loss_agg_mode="token-sum"),
        distillation=quiet_config(use_task_rewards=False, **settings),
        teacher_log_prob=row(*teacher),
    )
    loss.backward()
    return loss.detach(), student.grad, metrics


def test_policy_gradient_of_k1_lowers_what_the_teacher_finds_less_likely():
    """d = 0.5 and -0.5: advantages -0.5 and 0.5, ratio 1, loss -A, gradient -A."""
    loss, grad, _ = one_row((-1.0, -2.0), (-1.5, -1.5), distillation_loss_mode="k1", use_policy_gradient=True)
    close(loss, 0.0)
    close(grad, [[0.5, -0.5]])


def test_supervised_k3():
    """d = log 2: k3 = 1/2 + log 2 - 1, gradient 1 - 1/2; and d = -log 2: 2 - log 2 - 1, gradient 1 - 2."""
    log2 = torch.tensor(2.0, dtype=T).log().item()
    loss, grad, metrics = one_row(
        (-1.0, -1.0), (-1 - log2, -1 + log2), distillation_loss_mode="k3", use_policy_gradient=False
    )
    close(loss, (log2 - 0.5) + (1 - log2))
    close(grad, [[0.5, -1.0]])
    close(float(metrics["distillation/loss_min"]), log2 - 0.5)
    close(float(metrics["distillation/loss_max"]), 1 - log2)


def test_the_clamp_bounds_the_loss_on_both_sides_and_not_the_extremes():
    """d = 12 and -13 as advantages: -10 and 10."""
    loss, grad, metrics = one_row((-1.0, -14.0), (-13.0, -1.0), distillation_loss_mode="k1", use_policy_gradient=True)
    close(loss, 0.0)
    close(grad, [[10.0, -10.0]])
    close(float(metrics["distillation/loss_max"]), 12.0)
    close(float(metrics["distillation/loss_min"]), -13.0)
    close(float(metrics["distillation/abs_loss"]), 12.5)


def test_forward_kl_by_hand():
    """p = (0.6, 0.3), q = (0.3, 0.6): 0.6 log 2 - 0.3 log 2; gradient -p; what the teacher did not name counts 0."""
    student = torch.tensor([0.3, 0.6, 0.05], dtype=T).log().requires_grad_()
    teacher = torch.tensor([0.6, 0.3, 0.0], dtype=T).log()
    tokens = forward_kl_topk(student, teacher, overlap=torch.tensor([True, False, True]), log_prob_min_clamp=-10.0)
    tokens.loss.backward()
    log2 = torch.tensor(2.0, dtype=T).log().item()
    close(tokens.loss.detach(), 0.3 * log2)
    close(student.grad, [-0.6, -0.3, 0.0])
    close(tokens.student_mass, 0.9)
    close(tokens.teacher_mass, 0.9)
    close(tokens.overlap_count, 1.0)
    close(tokens.overlap_token_advantage, -0.6 * log2)


def test_a_student_below_the_log_prob_clamp_has_no_gradient():
    """q = (e^-4, 0.5) and a clamp at -3: as in verl the first token, where they differ most, is not pulled up."""
    student = torch.tensor([-4.0, 0.5], dtype=T)
    student[1] = student[1].log()
    student.requires_grad_()
    tokens = forward_kl_topk(student, torch.tensor([0.5, 0.5], dtype=T).log(), log_prob_min_clamp=-3.0)
    tokens.loss.backward()
    close(tokens.loss.detach(), 0.5 * (torch.tensor(0.5, dtype=T).log() + 3.0))
    close(student.grad, [0.0, -0.5])


def test_a_negative_topk_loss_is_zero_and_has_no_gradient():
    student = torch.tensor([[[0.8, 0.15]]], dtype=T).log().requires_grad_()
    teacher = torch.tensor([[[0.5, 0.1]]], dtype=T).log()
    loss, metrics = distillation_ppo_loss(
        *(torch.zeros(1, 1, dtype=T) for _ in range(3)),
        torch.ones(1, 1),
        config=ObjectiveConfig(),
        distillation=DistillationConfig(
            distillation_loss_mode="forward_kl_topk", use_task_rewards=False, use_policy_gradient=False
        ),
        topk=TopKScores(student, teacher),
    )
    loss.backward()
    assert loss.item() == 0 and not student.grad.any()
    close(float(metrics["distillation/student_mass"]), 0.95)


def kl(a, b):
    return (a.exp() * (a - b)).sum()


@pytest.mark.parametrize("mode", ["k1", "k3"])
def test_expected_policy_gradient_by_enumeration(mode):
    """Every token of a vocabulary of five, weighted by its probability: k1 gives grad KL(student || teacher).

    k3 gives that minus grad KL(teacher || student): nothing to first order where the two are close. Hence the warning.
    """
    logits = torch.tensor([0.3, -0.2, 0.5, 0.0, -1.0], dtype=T, requires_grad=True)
    teacher = torch.tensor([0.1, 0.4, -0.3, 0.2, 0.0], dtype=T).log_softmax(0)
    student = logits.log_softmax(0)
    loss, _ = distillation_ppo_loss(
        student[:, None],
        student.detach()[:, None],
        torch.zeros(5, 1, dtype=T),
        torch.ones(5, 1),
        config=ObjectiveConfig(loss_agg_mode="token-sum"),
        distillation=quiet_config(distillation_loss_mode=mode, use_task_rewards=False, use_policy_gradient=True),
        rollout_is_weights=student.detach().exp(),
        teacher_log_prob=teacher[:, None],
    )
    expected = kl(student, teacher) if mode == "k1" else kl(student, teacher) - kl(teacher, student)
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    close(grad, torch.autograd.grad(expected, logits)[0])


# Invariances

MODES = [
    {"distillation_loss_mode": "k2", "use_policy_gradient": False},
    {"distillation_loss_mode": "k1", "use_policy_gradient": True, "distillation_loss_coef": 0.5},
    {"distillation_loss_mode": "forward_kl_topk", "use_policy_gradient": False, "distillation_topk": 3},
]


def batch(garbage=None):
    """Eight rows of six tokens with uneven masks, one wholly masked; `garbage` fills what lies outside."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 0, 5, 2, 4, 6])[:, None]
    values = {name: torch.randn(8, 6, generator=generator, dtype=T) for name in ("log_prob", "old", "adv", "teacher")}
    values["old"] = values["log_prob"] + 0.2 * values["old"]
    values["student_topk"] = torch.randn(8, 6, 5, generator=generator, dtype=T).log_softmax(-1)[..., :3]
    values["teacher_topk"] = torch.randn(8, 6, 5, generator=generator, dtype=T).log_softmax(-1)[..., :3]
    if garbage is not None:
        for name, x in values.items():
            values[name] = torch.where(mask if x.ndim == 2 else mask[..., None], x, garbage)
    return values, mask


def run(values, mask, rows, settings, counts):
    take = {name: x[rows].clone() for name, x in values.items()}
    leaves = [take[name].requires_grad_() for name in ("log_prob", "student_topk")]
    overlap = torch.arange(3) < 2
    loss, metrics = distillation_ppo_loss(
        take["log_prob"],
        take["old"],
        take["adv"],
        mask[rows],
        config=ObjectiveConfig(loss_agg_mode="seq-mean-token-mean"),
        distillation=quiet_config(**settings),
        batch_info=counts,
        teacher_log_prob=take["teacher"],
        topk=TopKScores(take["student_topk"], take["teacher_topk"], overlap.expand(*mask[rows].shape, 3)),
    )
    loss.backward()
    return loss.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves], metrics


@pytest.mark.parametrize("garbage", [float("nan"), 1e4, float("-inf")])
@pytest.mark.parametrize("settings", MODES, ids=lambda s: s["distillation_loss_mode"])
def test_nothing_outside_the_mask_is_read(settings, garbage):
    clean, dirty = (run(*batch(fill), slice(None), settings, None) for fill in (None, garbage))
    close(dirty[0], clean[0])
    for got, expected in zip(dirty[1], clean[1], strict=True):
        close(got, expected)
    for name, metric in clean[2].items():
        close(float(dirty[2][name]), float(metric))


@pytest.mark.parametrize("settings", MODES, ids=lambda s: s["distillation_loss_mode"])
def test_one_row_at_a_time_is_all_at_once(settings):
    values, mask = batch()
    counts = BatchInfo(1, int(mask.sum()), 8)
    whole = run(values, mask, slice(None), settings, counts)
    parts = [run(values, mask, slice(i, i + 1), settings, counts) for i in range(8)]
    close(sum(part[0] for part in parts), whole[0])
    for i, expected in enumerate(whole[1]):
        close(torch.cat([part[1][i] for part in parts]), expected)
    for name, metric in whole[2].items():
        same = [part[2][name] for part in parts]
        if metric.extreme is not None:
            combined = (min if metric.extreme == "min" else max)(float(m) for m in same)
        elif metric.share:
            combined = sum(float(m) for m in same)
        else:
            combined = sum(float(m.total) for m in same) / max(sum(float(m.count) for m in same), 1)
        close(combined, float(metric), FLOAT32 if "clipfrac" in name else FLOAT64)  # a share of tokens is float32


@pytest.mark.parametrize("settings", MODES, ids=lambda s: s["distillation_loss_mode"])
def test_an_empty_micro_batch_is_a_differentiable_zero(settings):
    values, mask = batch(float("nan"))
    loss, grads, metrics = run(values, mask, slice(3, 4), settings, BatchInfo(1, 27, 8))
    assert loss.item() == 0 and not any(grad.any() for grad in grads)
    assert float(metrics["distillation/loss_min"]) == float("inf")


# Settings

TOPK = {"distillation_loss_mode": "forward_kl_topk", "use_policy_gradient": False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distillation_loss_mode": "k4"}, "choose one of kl, k1, abs, mse, k2, low_var_kl, k3, forward_kl_topk"),
        ({"distillation_loss_mode": "k3+"}, "'k3\\+' is unknown"),
        ({"distillation_loss_mode": "k1", "use_policy_gradient": False}, "ignores the teacher"),
        ({"distillation_loss_mode": "kl", "use_policy_gradient": False}, "ignores the teacher"),
        ({**TOPK, "distillation_topk": 0}, "distillation_topk=0 must be"),
        ({"distillation_topk": 16}, "distillation_topk=16 has no effect"),
        ({"distillation_log_prob_min_clamp": None}, "distillation_log_prob_min_clamp=None has no effect"),
        ({**TOPK, "distillation_log_prob_min_clamp": 1.0}, "must be a number of nats < 0"),
        ({"distillation_loss_max_clamp": 0}, "must be a number of nats > 0"),
        ({"distillation_loss_coef": float("nan")}, "distillation_loss_coef=nan must be a finite"),
        ({"use_task_rewards": False, "distillation_loss_coef": 0.5}, "set use_task_rewards=True"),
        ({**TOPK, "distillation_clip_ratio_high": 0.3}, "set use_policy_gradient=True"),
        ({"use_task_rewards": 1}, "use_task_rewards=1 must be True or False"),
    ],
)
def test_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        quiet_config(**settings)


@pytest.mark.parametrize("mode", ["forward_kl_topk", "k3"])
def test_a_policy_gradient_without_the_teachers_direction_warns(mode):
    with pytest.warns(UserWarning, match=f"'{mode}' with use_policy_gradient=True"):
        DistillationConfig(distillation_loss_mode=mode, use_policy_gradient=True)


@pytest.mark.parametrize(
    "objective", [{"use_kl_loss": True}, {"entropy_coeff": 0.1}, {"policy_loss": "gpg", "loss_agg_mode": "token-mean"}]
)
def test_terms_that_distillation_alone_drops_are_refused(objective):
    alone = DistillationConfig(use_task_rewards=False, use_policy_gradient=False)
    with pytest.raises(ValueError, match=f"{next(iter(objective))}=.* has no effect with use_task_rewards=False"):
        alone.require_compatible(ObjectiveConfig(**objective))


def test_missing_scores_are_named():
    ones = torch.ones(1, 2)
    call = {"config": ObjectiveConfig()}
    with pytest.raises(ValueError, match="needs teacher_log_prob"):
        distillation_ppo_loss(ones, ones, ones, ones, distillation=quiet_config(), **call)
    with pytest.raises(ValueError, match="needs topk"):
        distillation_ppo_loss(ones, ones, ones, ones, distillation=quiet_config(**TOPK), **call)
    with pytest.raises(ValueError, match="topk.teacher_log_probs has shape"):
        topk = TopKScores(torch.ones(1, 2, 4), torch.ones(1, 3, 4))
        distillation_ppo_loss(ones, ones, ones, ones, distillation=quiet_config(**TOPK), topk=topk, **call)
