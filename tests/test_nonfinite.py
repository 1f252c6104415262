"""Steps whose gradient is NaN or infinite: skipped, counted, and after several in a row the end of the run."""

import functools
import math

import pytest
import resume_worker as worker
import torch
from transformers import TrainerCallback

from grpo_ext import POLICY_LOSSES, register_policy_loss
from grpo_ext.training.checkpoints import last_usable

SETTINGS = {"max_steps": 5, "save_strategy": "no"}


class Outcomes(TrainerCallback):
    """Parameters and optimizer state at the start and after each step."""

    def __init__(self, trainer):
        self._trainer = trainer
        self.steps = []
        trainer.add_callback(self)

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.steps:
            self.steps.append(worker.outcome(self._trainer))

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(worker.outcome(self._trainer))

    def moved(self) -> list[bool]:
        return [bool(worker.differences(*pair)) for pair in zip(self.steps, self.steps[1:], strict=False)]


def skips(log: list[dict]) -> list[int]:
    return [entry["actor/nonfinite_skips"] for entry in log if "loss" in entry]


def change_inputs(trainer, steps, change) -> None:
    """Let `change(inputs)` alter each micro-batch of the given steps before the loss is computed."""
    compute_loss = trainer.compute_loss

    def changed(model, inputs, **kwargs):
        if trainer.state.global_step + 1 in steps:
            inputs = {name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()}
            change(inputs)
        return compute_loss(model, inputs, **kwargs)

    trainer.compute_loss = changed


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_bad_step_is_skipped_and_counted(tmp_path, kind, value, max_grad_norm):
    """Neither the parameters nor what AdamW keeps of each change, bit for bit; the next step is taken."""
    trainer = worker.trainer(tmp_path, kind, max_grad_norm=max_grad_norm, **SETTINGS)
    worker.spoil(trainer, [2, 4], "gradient", value=value)
    outcomes = Outcomes(trainer)
    trainer.train()
    assert outcomes.moved() == [True, False, True, False, True]
    assert skips(trainer.state.log_history) == [0, 1, 1, 2, 2]
    assert all(v.isfinite().all() for v in outcomes.steps[-1].values())


def test_a_bad_first_step_leaves_no_optimizer_state(tmp_path):
    trainer = worker.trainer(tmp_path, **SETTINGS)
    worker.spoil(trainer, [1])
    outcomes = Outcomes(trainer)
    trainer.train()
    assert outcomes.moved() == [False, True, True, True, True]


# The end of a run


def _nan(name, inputs):
    inputs[name].fill_(math.nan)


def _one_token(name, inputs):
    inputs[name][0, 0] = math.nan


@pytest.mark.parametrize(
    ("named", "change", "settings"),
    [
        ("advantage", functools.partial(_nan, "advantages"), {}),
        ("log-ratio", functools.partial(_nan, "old_per_token_logps"), {}),
        ("log-ratio", functools.partial(_one_token, "old_per_token_logps"), {}),
        ("reference log-ratio (KL)", functools.partial(_nan, "ref_per_token_logps"), worker.KL),
        ("reference log-ratio (KL)", functools.partial(_one_token, "ref_per_token_logps"), worker.KL),
    ],
)
def test_the_first_bad_quantity_is_named(tmp_path, named, change, settings):
    trainer = worker.trainer(tmp_path, **SETTINGS, **settings, max_nonfinite_steps=2)
    change_inputs(trainer, (3, 4), change)
    outcomes = Outcomes(trainer)
    with pytest.raises(FloatingPointError) as error:
        trainer.train()
    assert f"first non-finite quantity: {named}, at step 3)" in str(error.value)
    assert "max_nonfinite_steps=2" in str(error.value)
    assert outcomes.moved()[:3] == [True, True, False]
    assert worker.differences(outcomes.steps[2], worker.outcome(trainer)) == []


@pytest.mark.parametrize("how", ["gradient", "loss"])
def test_a_gradient_that_is_bad_by_itself_is_named(tmp_path, how):
    trainer = worker.trainer(tmp_path, policy_loss="spoiled", max_nonfinite_steps=1, **SETTINGS)
    worker.spoil(trainer, [2], how)
    with pytest.raises(FloatingPointError, match="first non-finite quantity: gradient .*, at step 2"):
        trainer.train()


def test_a_reference_with_a_bad_weight(tmp_path):
    """verl's k3 has gradient 0 where it is NaN: the policy's gradient alone would look healthy, without the KL term."""
    trainer = worker.trainer(tmp_path, **SETTINGS, **worker.KL)
    with torch.no_grad():
        trainer.ref_model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(FloatingPointError, match=r"3 optimizer steps in a row .* \(KL\), at step 1"):
        trainer.train()
    assert all(p.equal(before[name]) for name, p in trainer.model.named_parameters())


def test_a_model_with_a_bad_weight(tmp_path):
    """From the second step of a generation on: sampling from NaN is PyTorch's own error."""
    trainer = worker.trainer(tmp_path, **SETTINGS, max_nonfinite_steps=1)

    def break_it(inputs):
        with torch.no_grad():
            trainer.model.lm_head.weight[5] = math.nan

    change_inputs(trainer, [4], break_it)
    with pytest.raises(FloatingPointError, match="first non-finite quantity: log-prob, at step 4"):
        trainer.train()


def test_a_good_step_begins_the_row_anew(tmp_path):
    trainer = worker.trainer(tmp_path, max_steps=8, save_strategy="no", max_nonfinite_steps=3)
    worker.spoil(trainer, [1, 2, 4, 5, 7, 8])
    trainer.train()
    assert skips(trainer.state.log_history) == [1, 2, 2, 3, 4, 4, 5, 6]


# What makes a loss NaN, and whether its gradient is


def _with(change):
    def policy_loss(log_prob, *args, **kwargs):
        loss, metrics = POLICY_LOSSES["vanilla"](log_prob, *args, **kwargs)
        return (change(loss, log_prob) if worker._SPOILED["now"]() else loss), metrics

    return policy_loss


register_policy_loss("nan: times")(_with(lambda loss, log_prob: loss * math.nan))
register_policy_loss("nan: plus")(_with(lambda loss, log_prob: loss + math.nan))
register_policy_loss("nan: clamped")(_with(lambda loss, log_prob: (loss * math.nan).clamp(-1, 1)))
register_policy_loss("nan: root")(_with(lambda loss, log_prob: loss * log_prob.sqrt()))
register_policy_loss("nan: inf")(_with(lambda loss, log_prob: loss.abs() + math.inf))


@pytest.mark.parametrize(
    "settings",
    [
        *({"policy_loss": name} for name in POLICY_LOSSES if name.startswith("nan: ")),
        *({**worker.KL, "kl_loss_type": name} for name in ("k1", "abs", "k2", "k3", "k1+", "k3+")),
    ],
    ids=lambda settings: settings.get("kl_loss_type") or settings["policy_loss"],
)
def test_a_loss_that_is_not_finite_is_a_bad_step(tmp_path, settings):
    """By itself the gradient is finite of `plus` and `inf`, and of k1, abs and k3."""
    trainer = worker.trainer(tmp_path, max_steps=3, save_strategy="no", **settings)
    if "policy_loss" in settings:
        worker.spoil(trainer, [2], "loss")
    else:
        change_inputs(trainer, [2], functools.partial(_one_token, "ref_per_token_logps"))
    outcomes = Outcomes(trainer)
    trainer.train()
    assert outcomes.moved() == [True, False, True]
    assert skips(trainer.state.log_history) == [0, 1, 1]


def test_what_is_masked_may_be_nan(tmp_path):
    """Only the values under the mask count."""
    trainer = worker.trainer(tmp_path, max_steps=3, save_strategy="no", mask_truncated_completions=True, **worker.KL)

    def outside(inputs):
        for name in ("ref_per_token_logps", "old_per_token_logps"):
            inputs[name].masked_fill_(inputs["completion_mask"] == 0, math.nan)

    change_inputs(trainer, [1, 2, 3], outside)
    trainer.train()
    assert skips(trainer.state.log_history) == [0, 0, 0]


# Checkpoints


def test_the_last_good_checkpoint_stays_and_the_count_goes_on(tmp_path):
    """A run that was resumed counts on, the steps skipped in all as well as those in a row; a new one from 0."""
    settings = {"max_steps": 8, "save_total_limit": 1, "max_nonfinite_steps": 3}
    trainer = worker.trainer(tmp_path, **settings)
    worker.spoil(trainer, [2, 4, 5, 6])
    outcomes = Outcomes(trainer)
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row .* at step 4"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-5"]
    assert last_usable(str(tmp_path)).name == "checkpoint-5"

    worse = worker.trainer(tmp_path, **{**settings, "save_strategy": "no"})
    worker.spoil(worse, [6])
    resumed_worse = Outcomes(worse)
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row .* at step 4"):
        worse.train(resume_from_checkpoint=True)
    # What the checkpoint kept is what was good after step 3
    assert worker.differences(outcomes.steps[3], resumed_worse.steps[0]) == []

    better = worker.trainer(tmp_path, **settings)
    worker.spoil(better, [])
    better.train(resume_from_checkpoint=True)
    assert skips(better.state.log_history) == [0, 1, 1, 2, 3, 3, 3, 3]
    better.train()
    assert skips(better.state.log_history) == [0] * 8


def test_resumed_between_bad_steps_is_uninterrupted(tmp_path):
    settings = {"max_steps": 6, "policy_loss": "spoiled"}
    whole = worker.trainer(tmp_path / "whole", **settings)
    worker.spoil(whole, [2, 3, 5], "loss")
    whole.train()
    resumed = worker.trainer(tmp_path / "resumed", **settings)
    worker.spoil(resumed, [2, 3, 5], "loss")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert worker.differences(worker.outcome(whole), worker.outcome(resumed)) == []
    assert skips(whole.state.log_history) == skips(resumed.state.log_history) == [0, 1, 2, 2, 3, 3]


# Several ranks: one of them meets a NaN

ON_TWO = {"per_device_train_batch_size": 1, "max_steps": 5, "policy_loss": "spoiled", "max_nonfinite_steps": 2}


def assert_skipped_on_two_ranks(folder, backends: dict[str, dict]) -> None:
    """Steps 2 and 4 are skipped on both ranks; a run whose steps 2 and 3 are bad ends at step 3, as after step 1."""
    jobs = []
    for name, settings in backends.items():
        common = {**ON_TWO, **worker.KL, **settings}
        spoiled = {"rank": 1, "how": "loss"}
        jobs += [
            {"out": f"{folder}/{name}/skipped", "settings": common, "spoil": {"steps": [2, 4], **spoiled}},
            {"out": f"{folder}/{name}/ended", "settings": common, "spoil": {"steps": [2, 3], **spoiled}},
            # The learning rate of a first step does not depend on how many follow
            {"out": f"{folder}/{name}/one", "settings": {**common, "max_steps": 1}, "spoil": {"steps": [], **spoiled}},
        ]
    worker.launch(jobs, ranks=2)
    for name in backends:
        for rank in (0, 1):
            skipped, ended, one = (worker.result(f"{folder}/{name}/{run}", rank) for run in ("skipped", "ended", "one"))
            assert skipped["error"] is None and one["error"] is None
            assert all(value.isfinite().all() for value in skipped["outcome"].values())
            assert ended["error"].startswith("FloatingPointError: 2 optimizer steps in a row")
            assert "at step 2" in ended["error"]
            assert worker.differences(ended["outcome"], one["outcome"]) == []
            assert worker.differences(skipped["outcome"], one["outcome"])
        assert skips(worker.result(f"{folder}/{name}/skipped")["log"]) == [0, 1, 1, 2, 2]
        assert last_usable(f"{folder}/{name}/ended").name == "checkpoint-2"


def test_nan_on_one_rank_of_two(tmp_path):
    assert_skipped_on_two_ranks(tmp_path, {"ddp": {}})


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_nan_on_one_rank_under_zero(tmp_path, bf16):
    """DeepSpeed skips such steps itself; here they are counted, and end the run."""
    assert_skipped_on_two_ranks(tmp_path, {f"zero{stage}": {"zero": stage, "bf16": bf16} for stage in (1, 2, 3)})
