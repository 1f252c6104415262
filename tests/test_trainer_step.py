"""The trainer's optimizer step against `ppo_loss` on all its rows as one tensor, on one process."""

import copy
import functools
import math

import pytest
import tiny
import torch

from grpo_ext import LOSS_AGG_MODES, GRPOVerlConfig, GRPOVerlTrainer, StepMetricsCallback, ppo_loss
from grpo_ext.objective import BatchInfo

LR = 0.5


def make(
    tmp_path,
    model=None,
    *,
    rollout=tiny.fixed_rollout,
    reward=tiny.length_reward,
    dataset=None,
    eval_dataset=None,
    **settings,
):
    """A trainer that takes plain SGD steps on fixed responses."""
    args = GRPOVerlConfig(
        str(tmp_path),
        **{
            **tiny.SETTINGS,
            "per_device_train_batch_size": 8,
            "max_steps": 1,
            "learning_rate": LR,
            "optim": "sgd",
            "max_grad_norm": 0,
            **settings,
        },
    )
    return GRPOVerlTrainer(
        tiny.model() if model is None else model,
        reward,
        args,
        tiny.prompts() if dataset is None else dataset,
        processing_class=tiny.tokenizer(),
        rollout_func=rollout,
        eval_dataset=eval_dataset,
    )


def parameters(model) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


class Recorder(StepMetricsCallback):
    def __init__(self):
        self.steps = []

    def on_step_metrics(self, args, state, control, metrics, **kwargs):
        self.steps.append(metrics)


def log_probs_and_entropy(model, prompt_ids, completion_ids):
    """Of each completion token, plainly: one row at a time, through the logits, without padding."""
    logits = model(torch.tensor([prompt_ids + completion_ids])).logits[0, len(prompt_ids) - 1 : -1].double()
    log_softmax = torch.log_softmax(logits, -1)
    chosen = log_softmax.gather(1, torch.tensor(completion_ids)[:, None])[:, 0]
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1)


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def expected_step(model, rows, objective, *, reference=None, old=None, mask_of=None):
    """The parameters after one SGD step on `ppo_loss` of all rows as one tensor, and its metrics."""
    model = copy.deepcopy(model).double()
    scored = [log_probs_and_entropy(model, row["prompt_ids"], row["completion_ids"]) for row in rows]
    log_prob, entropy = padded([s[0] for s in scored]), padded([s[1] for s in scored])
    mask = padded([torch.tensor(mask_of(row) if mask_of else [1] * len(row["completion_ids"])) for row in rows])

    def frozen(other):
        with torch.no_grad():
            other = copy.deepcopy(other).double()
            return padded([log_probs_and_entropy(other, r["prompt_ids"], r["completion_ids"])[0] for r in rows])

    loss, metrics = ppo_loss(
        log_prob,
        log_prob.detach() if old is None else frozen(old),
        torch.tensor([row["advantage"] for row in rows], dtype=torch.float64),
        mask,
        config=objective,
        batch_info=BatchInfo(1, mask.sum(), len(rows)),
        entropy=entropy if objective.entropy_coeff else None,
        ref_log_prob=None if reference is None else frozen(reference),
    )
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LR * parameter.grad
    return model, {name: float(value) for name, value in metrics.items()}


def rows_of(trainer):
    """What the trainer was fed in its last generation, row by row."""
    rows = []
    for batch in trainer._rollout.micro_batches:
        for i in range(len(batch["advantages"])):
            rows.append(
                {
                    "prompt_ids": batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
                    "completion_ids": batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist(),
                    "advantage": batch["advantages"][i].item(),
                }
            )
    return rows


def relative_gap(trained, expected, start) -> float:
    """Difference of the parameters over the size of the step."""
    before, wanted, got = parameters(start), parameters(expected), parameters(trained)
    assert (wanted - before).norm() > 0
    return ((got - wanted).norm() / (wanted - before).norm()).item()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_one_step_is_ppo_loss_on_all_rows(tmp_path, mode):
    model, reference = tiny.model(), tiny.model(seed=1)
    start = copy.deepcopy(model)
    scale = {"learning_rate": LR}
    trainer = make(
        tmp_path,
        model,
        loss_agg_mode=mode,
        entropy_coeff=0.02,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        **scale,
    )
    trainer.ref_model.load_state_dict(reference.state_dict())  # a KL gradient needs a reference with other weights
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    expected, metrics = expected_step(start, rows_of(trainer), trainer.objective_config, reference=reference)
    assert relative_gap(trainer.model, expected, start) < 1e-5
    (recorded,) = recorder.steps
    for name, value in metrics.items():
        assert recorded[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert trainer.state.log_history[0]["actor/kl_loss"] == recorded["actor/kl_loss"]
    assert math.isclose(
        trainer.state.log_history[0]["loss"],
        metrics["actor/pg_loss"] - 0.02 * metrics["actor/entropy_loss"] + 0.1 * metrics["actor/kl_loss"],
        rel_tol=1e-4,
        abs_tol=1e-5,
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_sign_raises_the_rewarded_response(tmp_path, mode):
    """After a step on a reward for one token, that token is more probable."""
    model = tiny.model()
    target = 30
    prompts = tiny.prompts(2)

    def rollout(listed, trainer):
        tok = trainer.processing_class
        ids = [[target if i % 2 else 40 + i] for i in range(len(listed))]
        return {
            "prompt_ids": [tok(p)["input_ids"] for p in listed],
            "completion_ids": ids,
            "logprobs": [[0.0]] * len(ids),
        }

    def reward(completion_ids, **kwargs):
        return [float(ids[0] == target) for ids in completion_ids]

    def probability(net):
        with torch.no_grad():
            return [
                log_probs_and_entropy(net, tiny.tokenizer()(p)["input_ids"], [target])[0].item()
                for p in prompts["prompt"]
            ]

    before = probability(model)
    trainer = make(
        tmp_path, model, rollout=rollout, reward=reward, dataset=prompts, loss_agg_mode=mode, learning_rate=1e-3
    )
    trainer.train()
    assert all(after > b for after, b in zip(probability(trainer.model), before, strict=True))


def test_several_steps_per_generation_each_with_its_own_counts(tmp_path):
    """Two optimizer steps on one generation: the second is off-policy and has its own token count."""
    model = tiny.model()
    start = copy.deepcopy(model)
    trainer = make(
        tmp_path,
        model,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=2,
    )
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    rows = rows_of(trainer)
    assert sum(len(r["completion_ids"]) for r in rows[:4]) != sum(len(r["completion_ids"]) for r in rows[4:])
    first, _ = expected_step(start, rows[:4], trainer.objective_config, old=start)
    second, metrics = expected_step(first, rows[4:], trainer.objective_config, old=start)
    assert relative_gap(trainer.model, second, start) < 1e-5
    assert recorder.steps[1]["actor/ppo_kl"] == pytest.approx(metrics["actor/ppo_kl"], rel=1e-4)
    assert abs(metrics["actor/ppo_kl"]) > 1e-4


def test_num_iterations_reuses_the_rows_in_order(tmp_path):
    model = tiny.model()
    start = copy.deepcopy(model)
    trainer = make(tmp_path, model, num_iterations=2, max_steps=2)
    trainer.train()
    rows = rows_of(trainer)
    first, _ = expected_step(start, rows, trainer.objective_config, old=start)
    second, _ = expected_step(first, rows, trainer.objective_config, old=start)
    assert relative_gap(trainer.model, second, start) < 1e-5


def test_tool_tokens_are_not_trained_on(tmp_path):
    model = tiny.model()
    start = copy.deepcopy(model)
    trainer = make(tmp_path, model, rollout=functools.partial(tiny.fixed_rollout, tool_mask=True))
    trainer.train()
    rows = rows_of(trainer)
    expected, _ = expected_step(
        start,
        rows,
        trainer.objective_config,
        mask_of=lambda row: [int(i % 3 != 1) for i in range(len(row["completion_ids"]))],
    )
    assert relative_gap(trainer.model, expected, start) < 1e-5


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_masked_truncated_completions_count_as_sequences_only(tmp_path, mode):
    model = tiny.model()
    start = copy.deepcopy(model)
    trainer = make(
        tmp_path,
        model,
        mask_truncated_completions=True,
        loss_agg_mode=mode,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    rows = rows_of(trainer)
    empty = [row for row in rows if not row["completion_ids"]]
    assert empty and len(rows) == 8
    whole = [row for row in rows if row["completion_ids"]]
    # N_seq is 8: scale the mean over the whole rows down to it
    expected, _ = expected_step(start, whole, trainer.objective_config)
    step = parameters(expected) - parameters(start)
    if mode == "seq-mean-token-mean":
        step *= len(whole) / 8
    got = parameters(trainer.model) - parameters(start)
    assert ((got - step).norm() / step.norm()).item() < 1e-5


def test_everything_masked_leaves_the_parameters_alone(tmp_path):
    model = tiny.model()
    start = copy.deepcopy(model)

    def endless(listed, trainer):
        tok = trainer.processing_class
        return {
            "prompt_ids": [tok(p)["input_ids"] for p in listed],
            "completion_ids": [[10 + i, 11] for i in range(len(listed))],
            "logprobs": [[0.0, 0.0]] * len(listed),
        }

    trainer = make(
        tmp_path, model, rollout=endless, mask_truncated_completions=True, use_kl_loss=True, entropy_coeff=0.1
    )
    trainer.train()
    assert torch.equal(parameters(trainer.model), parameters(start))
    assert trainer.state.log_history[0]["actor/pg_loss"] == 0.0


def test_rows_keep_their_order_unless_shuffled(tmp_path):
    """Without shuffling each optimizer step has the responses to one prompt; TRL's order would mix the prompts."""

    def prompts_of_steps(**settings):
        trainer = make(
            tmp_path,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            steps_per_generation=4,
            max_steps=2,
            **settings,
        )
        trainer.train()
        rows = [tuple(row["prompt_ids"]) for row in rows_of(trainer)]
        return [set(rows[:4]), set(rows[4:])]

    assert [len(prompts) for prompts in prompts_of_steps(seed=3)] == [1, 1]
    assert [len(prompts) for prompts in prompts_of_steps(seed=3, shuffle_mini_batches=True)] == [2, 2]


def test_the_norm_mode_divides_by_max_completion_length_and_not_by_padding(tmp_path):
    model = tiny.model()
    start = copy.deepcopy(model)
    trainer = make(tmp_path, model, loss_agg_mode="seq-mean-token-sum-norm", max_completion_length=77)
    trainer.train()
    assert trainer.objective_config.loss_scale_factor == 77
    expected, _ = expected_step(start, rows_of(trainer), trainer.objective_config)
    assert relative_gap(trainer.model, expected, start) < 1e-5


def test_evaluation_has_its_own_metrics_and_touches_no_training_state(tmp_path):
    def run(**settings):
        trainer = make(
            tmp_path,
            tiny.model(),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            eval_dataset=tiny.prompts(4),
            **settings,
        )
        recorder = Recorder()
        trainer.add_callback(recorder)
        trainer.train()
        return trainer, recorder

    plain, plain_steps = run()
    evaluated, steps = run(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8)
    assert torch.equal(parameters(plain.model), parameters(evaluated.model))
    for step in (*steps.steps, *plain_steps.steps):
        assert step.pop("perf/tokens_per_second") > 0  # the one number that time decides
    assert steps.steps == plain_steps.steps
    entries = [entry for entry in evaluated.state.log_history if "eval_loss" in entry]
    assert len(entries) == 2
    assert {"eval_actor/pg_loss", "eval_actor/pg_clipfrac", "eval_reward", "eval_entropy"} <= set(entries[0])


def test_keys_whose_term_is_off_are_absent(tmp_path):
    trainer = make(tmp_path)
    trainer.train()
    logged = {name for name in trainer.state.log_history[0] if name.startswith("actor/")}
    assert logged == {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/nonfinite_skips",
    }
    assert "entropy" in trainer.state.log_history[0]


def test_steps_are_averaged_between_logs(tmp_path):
    trainer = make(tmp_path, max_steps=4, logging_steps=2, num_iterations=2)
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2 and len(recorder.steps) == 4
    for i, entry in enumerate(logs):
        pair = [step["actor/ppo_kl"] for step in recorder.steps[2 * i : 2 * i + 2]]
        assert entry["actor/ppo_kl"] == pytest.approx(sum(pair) / 2, rel=1e-12)


def test_the_reference_of_a_model_in_memory_is_a_frozen_copy(tmp_path):
    model = tiny.model()
    start = copy.deepcopy(model)
    trainer = make(tmp_path, model, use_kl_loss=True, kl_loss_coef=0.1, max_steps=3)
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    assert recorder.steps[0]["actor/kl_loss"] == 0.0
    assert recorder.steps[2]["actor/kl_loss"] > 1e-6
    assert torch.equal(parameters(trainer.ref_model), parameters(start))
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    assert trainer.state.log_history[0]["actor/kl_coef"] == 0.1
