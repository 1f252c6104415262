"""Rollout correction in the trainer: the sampler's log-probabilities come from a `rollout_func`."""

import math
from types import SimpleNamespace

import pytest
import tiny
import torch
from test_trainer_step import Recorder, make

from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer
from grpo_ext.objective import RolloutCorrection
from grpo_ext.objective.rollout_correction import rejection_mask, rollout_correction_weights
from grpo_ext.training.windows import response_mask

SAMPLER_LOG_PROB = -4.0


def rollout(listed_prompts, trainer) -> dict:
    output = tiny.fixed_rollout(listed_prompts, trainer)
    output["logprobs"] = [[SAMPLER_LOG_PROB] * len(ids) for ids in output["completion_ids"]]
    return output


def trained(tmp_path, *, rollout=rollout, **settings):
    """A trainer after one step, its micro-batches, and what it recorded and logged."""
    trainer = make(tmp_path, rollout=rollout, **settings)
    seen, recorder, split = [], Recorder(), trainer._splitter

    def spy():
        inner = split()
        return SimpleNamespace(split=lambda batch, *rest: (seen.append(dict(batch)), inner.split(batch, *rest))[1])

    trainer._splitter = spy
    trainer.add_callback(recorder)
    trainer.train()
    (batch,) = seen
    return batch, recorder.steps[0], trainer.state.log_history[0]


def log_probs_of_the_start(tmp_path, batch):
    """`(B, T)` of the untrained model."""
    trainer = make(tmp_path)
    return trainer._old_log_probs(batch)


def test_weights_and_rejection_are_those_of_the_objective(tmp_path):
    settings = {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_rs": "token_k1"}
    settings["rollout_rs_threshold"] = "0.05_20.0"
    batch, _, log = trained(tmp_path / "a", **settings)
    correction = RolloutCorrection(**settings)
    old = log_probs_of_the_start(tmp_path / "b", batch)
    sampler = torch.full_like(old, SAMPLER_LOG_PROB)
    whole = batch["completion_mask"]
    expected = rollout_correction_weights(old, sampler, whole, correction, mean=None)
    kept = rejection_mask(old, sampler, whole, correction)
    assert 0 < kept.sum() < whole.sum()
    assert torch.equal(response_mask(batch).bool(), kept.bool())
    torch.testing.assert_close(batch["importance_sampling_ratio"][kept.bool()], expected[kept.bool()].float())
    gap = ((sampler - old) * whole).sum() / whole.sum()
    assert log["rollout_corr/kl"] == pytest.approx(gap.item(), abs=1e-5)


def test_rejection_comes_before_whitening(tmp_path):
    """`reinforce_plus_plus` whitens over the tokens that are left."""
    batch, _, _ = trained(
        tmp_path, adv_estimator="reinforce_plus_plus", rollout_rs="token_k1", rollout_rs_threshold="0.05_20.0"
    )
    kept = batch["advantages"][response_mask(batch).bool()].double()
    assert kept.mean().item() == pytest.approx(0, abs=1e-5)
    assert kept.std().item() == pytest.approx(1, abs=1e-3)


def test_bypass_takes_the_samplers_log_probs_as_the_old_ones(tmp_path):
    batch, metrics, _ = trained(tmp_path, policy_loss="bypass_mode")
    assert set(batch["old_per_token_logps"][response_mask(batch).bool()].tolist()) == {SAMPLER_LOG_PROB}
    assert math.isfinite(metrics["actor/ppo_kl"]) and metrics["actor/ppo_kl"] != 0


def test_a_rollout_without_log_probs_is_refused(tmp_path):
    def silent(listed_prompts, trainer):
        return {**tiny.fixed_rollout(listed_prompts, trainer), "logprobs": None}

    with pytest.raises(ValueError, match="needs the sampler's log-probabilities"):
        trained(tmp_path, rollout=silent, rollout_is="token")


@pytest.mark.parametrize(
    "settings", [{"rollout_is": "token"}, {"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0},
                 {"policy_loss": "bypass_mode"}],
)  # fmt: skip
def test_a_sampler_without_log_probs_is_refused_before_the_model_is_loaded(tmp_path, settings):
    args = GRPOVerlConfig(str(tmp_path), num_generations=4, use_cpu=True, report_to=[], **settings)
    name = next(iter(settings))
    with pytest.raises(ValueError, match=f"{name}=.* needs the sampler's log-probabilities.*use_vllm"):
        GRPOVerlTrainer("no/such/model", tiny.length_reward, args, tiny.prompts(), processing_class=tiny.tokenizer())


def test_a_threshold_from_a_command_line_is_the_number():
    assert not RolloutCorrection(rollout_is_threshold="2.0").active  # the default, and no setting without effect
