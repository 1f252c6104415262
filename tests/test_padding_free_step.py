"""The trainer's step with every way of running rows through the model: the same parameters, the same metrics."""

import math

import pytest
import tiny
import torch
from test_trainer_step import Recorder, make, parameters

PERFORMANCE = {"perf/tokens_per_second", "perf/padding_fraction", "perf/skipped_row_fraction"}


def run(tmp_path, **settings):
    """Parameters and step metrics of two optimizer steps on one generation, 16 rows in 8 micro-batches."""
    trainer = make(
        tmp_path,
        tiny.model(),
        **{
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "steps_per_generation": 8,
            "max_steps": 2,
            **settings,
        },
    )
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    return trainer, parameters(trainer.model), recorder.steps


def assert_same(a, b, start):
    step = (b[1] - start).norm()
    assert ((a[1] - b[1]).norm() / step).item() < 1e-5
    for first, second in zip(a[2], b[2], strict=True):
        assert set(first) - PERFORMANCE == set(second) - PERFORMANCE
        for name in set(first) - PERFORMANCE:
            assert first[name] == pytest.approx(second[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("layout", ["grouped", "packed"])
@pytest.mark.parametrize("budget", [None, 25])
def test_layouts_agree(tmp_path, layout, budget):
    start = parameters(tiny.model())
    settings = {"entropy_coeff": 0.02, "use_kl_loss": True, "kl_loss_coef": 0.1}
    padded = run(tmp_path, forward_layout="padded", **settings)
    free = run(tmp_path, forward_layout=layout, max_tokens_per_forward=budget, **settings)
    assert_same(free, padded, start)
    assert padded[2][0]["perf/padding_fraction"] > 0.3
    assert free[2][0]["perf/padding_fraction"] < (1e-9 if layout == "packed" else 0.3)
    assert free[2][0]["perf/tokens_per_second"] > 0


def half_flat(completion_ids, prompts, **kwargs):
    """Every second group has equal rewards, so that its advantages are 0."""
    flat = {prompt: i % 2 for i, prompt in enumerate(dict.fromkeys(prompts))}
    return [0.7 if flat[p] else float(len(ids)) for ids, p in zip(completion_ids, prompts, strict=True)]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("entropy", [True, False])
def test_rows_without_an_advantage_skip_the_backward_and_change_nothing(tmp_path, steps, entropy):
    """On-policy (one step per generation) and off-policy (two), against TRL's padded forward of all rows."""
    settings = {
        "reward": half_flat,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4 // steps,
        "steps_per_generation": 4,
        "max_steps": steps,
        "calculate_entropy": entropy,
    }
    start = parameters(tiny.model())
    skipping = run(tmp_path, **settings)
    plain = run(tmp_path, forward_layout="padded", **settings)
    assert_same(skipping, plain, start)
    assert ("entropy" in skipping[2][0]) == entropy
    shares = [step["perf/skipped_row_fraction"] for step in skipping[2]]
    assert sum(shares) / len(shares) == pytest.approx(0.5)
    assert all(step["perf/skipped_row_fraction"] == 0 for step in plain[2])
    # On-policy and without the entropy no metric needs the row at all
    rollout = skipping[0]._rollout
    assert any(plan.observe for plan in rollout.plans) == (entropy or steps == 2)


@pytest.mark.parametrize("settings", [{"use_kl_loss": True}, {"entropy_coeff": 0.1}])
def test_no_row_is_skipped_while_another_term_trains_it(tmp_path, settings):
    _, _, steps = run(tmp_path, reward=half_flat, **settings)
    assert [step["perf/skipped_row_fraction"] for step in steps] == [0, 0]


def test_all_rows_skipped_leaves_the_parameters_alone(tmp_path):
    start = parameters(tiny.model())
    _, after, steps = run(tmp_path, reward=lambda completions, **kwargs: [1.0] * len(completions))
    assert torch.equal(start, after)
    assert steps[0]["perf/skipped_row_fraction"] == 1.0
    assert steps[0]["entropy"] > 1 and math.isfinite(steps[0]["actor/ppo_kl"])
