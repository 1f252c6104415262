"""The preflight: the numbers of the plan, and each warning where it is due and where it is not."""

import json
import random
import types

import numpy as np
import pytest
import tiny
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from test_trainer_step import make
from torch import nn

from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer
from grpo_ext.tasks.gsm8k import load_gsm8k
from grpo_ext.tasks.rewards import REWARDS
from grpo_ext.tasks.word_problems import load_word_problems
from grpo_ext.training import plan
from grpo_ext.training.plan import BatchPlan

GOLDS = ["w3", "w4", "w3", "w5"]


def config(tmp_path, **settings):
    return GRPOVerlConfig(str(tmp_path), use_cpu=True, report_to=[], **settings)


def trainer(tmp_path, reward=tiny.length_reward, dataset=None, **settings):
    """One that samples by itself, so that its rewards can be tried."""
    return make(tmp_path, reward=reward, dataset=dataset, rollout=None, **settings)


SHORT = {"max_completion_length": 2}  # of a run that samples


def questions(golds=GOLDS, column="answer", *, text=False):
    prompts = [f"w{i}" if text else [{"role": "user", "content": f"w{i}"}] for i in range(len(golds))]
    return Dataset.from_dict({"prompt": prompts, column: golds})


def content(completion) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def right(completions, answer, **kwargs):
    return [float(content(c) == f"#### {gold}") for c, gold in zip(completions, answer, strict=True)]


def inverted(completions, answer, **kwargs):
    return [1 - r for r in right(completions, answer)]


def broken(completions, answer, **kwargs):
    if answer[0].startswith("w") and len(completions) == 2 * len(plan.FORMS):  # the trial alone
        raise KeyError("gold")
    return [0.0] * len(completions)


def brevity(completions, **kwargs):
    return [-float(len(content(c))) for c in completions]


def warned(made) -> list[str]:
    return [line for line in plan.preflight_report(made).splitlines() if line.startswith("WARNING")]


# The plan


def numbers(made: BatchPlan) -> dict[str, float]:
    return {line.quantity: line.number for line in made.lines()}


def test_one_process(tmp_path):
    """16 responses a generation in one step of 2 micro-batches: 4 prompts; 10 are 2 generations and 2 over."""
    args = config(
        tmp_path,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=4,
        num_train_epochs=3,
    )
    assert numbers(BatchPlan.of(args, 1, 10)) == {
        "prompts a generation": 4,
        "responses to a prompt": 4,
        "responses a generation": 16,
        "micro-batches a generation, rank": 2,
        "responses in a micro-batch, rank": 8,
        "micro-batches in a step, rank": 2,
        "prompts in an optimizer step": 4,
        "passes over a generation": 1,
        "optimizer steps a generation": 1,
        "generations an epoch": 2,
        "prompts dropped an epoch": 2,
        "optimizer steps in all": 6,
        "generations in all": 6,
    }


def test_two_processes_several_steps_and_passes():
    """6 micro-batches of 4 rows on 2 ranks are 48 responses to 12 prompts; 3 steps of 16 each pass, 2 passes."""
    made = BatchPlan(2, 4, 4, 2, 6, 2, max_steps=13, dataset_prompts=100)
    assert (made.responses, made.prompts, made.responses_per_step, made.prompts_per_step) == (48, 12, 16, 4)
    assert (made.steps_of_generation, made.generations_per_epoch, made.dropped) == (6, 8, 4)
    assert (made.total_steps, made.total_generations) == (13, 3)  # the third generation is cut short


def test_without_a_known_dataset_and_with_split_groups():
    made = BatchPlan(1, 8, 4, 1, 2)
    assert made.prompts_per_step == 0.5
    assert made.dropped is None and made.total_steps is None and made.total_generations is None
    assert "dropped" not in str(made) and "0.5" in str(made)


def test_the_steps_are_those_of_the_trainer(tmp_path):
    made = trainer(tmp_path, max_steps=-1, num_train_epochs=1, steps_per_generation=2, num_iterations=2, **SHORT)
    made.train()  # 8 prompts, 4 a generation, 2 steps a pass
    promised = BatchPlan.of(made.args, 1, len(made.train_dataset))
    assert made.state.max_steps == promised.total_steps == 8


def test_both_vocabularies(tmp_path):
    made = config(tmp_path, per_device_train_batch_size=8, num_generations=4, max_steps=2)
    lines = {line.quantity: line for line in BatchPlan.of(made, 1, 8).lines()}
    assert lines["prompts a generation"][2:] == ("generation_batch_size / num_generations", "data.train_batch_size")
    assert lines["prompts in an optimizer step"].verl == "actor.ppo_mini_batch_size"
    keys = {key for line in lines.values() for key in line.trl.split() if "_" in key}
    assert all(hasattr(made, key) for key in keys)


# Parameters and memory


def test_parameters_and_references(tmp_path):
    plain = trainer(tmp_path)
    count = sum(p.numel() for p in plain.model.parameters())
    assert plan.count_parameters(plain.model) == (count, count)
    assert plan.reference_kind(plain) == "none"
    assert plan.reference_kind(trainer(tmp_path, use_kl_loss=True)) == f"a frozen copy of {count:,} parameters"
    args = config(tmp_path, per_device_train_batch_size=8, num_generations=4, use_kl_loss=True)
    adapted = GRPOVerlTrainer(
        tiny.model(),
        tiny.length_reward,
        args,
        tiny.prompts(),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
    )
    trained, total = plan.count_parameters(adapted.model)
    assert trained == 2 * (2 * 16 + 2 * 16) and total == count + trained  # 2 layers, A and B of rank 2, width 16
    assert plan.reference_kind(adapted) == "the model with its adapter off"


def test_a_shard_is_counted_whole():
    shard = nn.Parameter(torch.zeros(3))
    shard.ds_numel = 12
    assert plan.elements(shard) == 12


def on(made, distributed, ranks=4, stage=0, precision="no"):
    """The trainer as if it were launched so."""
    made.accelerator = types.SimpleNamespace(
        distributed_type=distributed,
        num_processes=ranks,
        mixed_precision=precision,
        state=types.SimpleNamespace(deepspeed_plugin=types.SimpleNamespace(zero_stage=stage)),
    )
    return plan.estimate_memory(made)


def test_memory(tmp_path):
    made = trainer(tmp_path, use_kl_loss=True, optim="adamw_torch")
    n = plan.count_parameters(made.model)[0]
    assert plan.estimate_memory(made) == (4 * n, 4 * n, 8 * n, 4 * n)
    assert on(made, DistributedType.MULTI_GPU) == (4 * n, 4 * n, 8 * n, 4 * n)
    assert on(made, DistributedType.FSDP) == (n, n, 2 * n, n)
    # Two bytes a parameter; master weights and two moments in float32 are 12
    for stage, expected in (
        (0, (2 * n, 2 * n, 12 * n, 2 * n)),
        (1, (2 * n, 2 * n, 3 * n, 2 * n)),
        (2, (2 * n, n // 2, 3 * n, 2 * n)),
        (3, (n // 2, n // 2, 3 * n, n // 2)),
    ):
        assert on(made, DistributedType.DEEPSPEED, 4, stage, "bf16") == expected
    # In float32 ZeRO-1 and ZeRO-2 clone the rank's weights, 4 + 8; the others update the weights themselves
    for stage, expected in ((0, 8 * n), (1, 3 * n), (2, 3 * n), (3, 2 * n)):
        assert on(made, DistributedType.DEEPSPEED, 4, stage).optimizer == expected


def test_an_unknown_optimizer_is_said_to_be_left_out(tmp_path):
    assert plan.estimate_memory(trainer(tmp_path, optim="sgd")).optimizer == 0
    made = trainer(tmp_path, optim="adafactor")
    assert plan.estimate_memory(made).optimizer is None
    assert "not counted: the optimizer's state, activations" in plan.preflight_report(made)


# End of a turn, padding


def test_a_turn_that_ends_no_response(tmp_path):
    """A base model: its end token is not the one that its chat template closes turns with."""
    made = trainer(tmp_path, dataset=questions())
    assert not plan.check_end_of_turn(made)
    made.processing_class.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    made.processing_class.chat_template = made.processing_class.chat_template.replace("<eos>", "<turn>")
    (said,) = plan.check_end_of_turn(made)
    assert said.startswith("eos_token='<eos>': the chat template closes an assistant turn with '<turn>'")
    assert "max_completion_length=40" in said and "set the tokenizer's eos_token='<turn>'" in said
    made.eos_token_ids.append(made.processing_class.convert_tokens_to_ids("<turn>"))  # as of the generation config
    assert not plan.check_end_of_turn(made)


def test_a_turn_that_nothing_closes_and_prompts_that_are_text(tmp_path):
    made = trainer(tmp_path, dataset=questions(text=True))
    made.processing_class.chat_template = made.processing_class.chat_template.replace("<eos>", "w7")
    assert not plan.check_end_of_turn(made)
    made = trainer(tmp_path, dataset=questions())
    made.processing_class.chat_template = made.processing_class.chat_template.replace("<eos>", "")
    assert not plan.check_end_of_turn(made)


def test_padding_is_said(tmp_path):
    made = trainer(tmp_path)
    assert "end of a response: '<eos>' (1); padding: '<pad>' (0)" in plan.preflight_report(made)
    made.processing_class.pad_token = "<eos>"
    assert "padding: the same token, harmless" in plan.preflight_report(made)
    assert not warned(made)


# Lengths of prompts


def test_prompts_that_leave_no_room(tmp_path, monkeypatch):
    """The context has 128 tokens, 40 of them for the response: 88 are left."""
    lengths = [3, 88, 89, 5, 120, 7, 8, 9]
    made = trainer(tmp_path, dataset=Dataset.from_dict({"prompt": ["w1 " * n for n in lengths]}))
    monkeypatch.setattr(plan, "PROMPTS_AT_A_TIME", 2)
    (said,) = plan.check_prompt_lengths(made)
    assert said.startswith("at least 2 of 8 prompts looked at (of 8) have more than 88 tokens (max_position_embeddings")
    assert "=128 less max_completion_length=40), at most 120; filter them out" in said
    monkeypatch.setattr(plan, "MAX_PROMPTS", 4)
    (said,) = plan.check_prompt_lengths(made)  # every second
    assert said.startswith("at least 2 of 4 prompts looked at (of 8)")
    made.args.max_completion_length = 8
    assert not plan.check_prompt_lengths(made)


def test_the_search_for_long_prompts_goes_by_bytes(tmp_path, monkeypatch):
    """Ten characters of three bytes before twenty of one; a batch without a long prompt ends the search."""
    made, seen = trainer(tmp_path), []
    monkeypatch.setattr(plan, "PROMPTS_AT_A_TIME", 1)
    monkeypatch.setattr(made, "_tokenize_prompts", lambda some: (seen.extend(some) or [[0] * 99],))
    wide, narrow = "字" * 10, "w" * 20
    plan._lengths_above(50, [narrow, wide], made)
    assert seen == [wide, narrow]
    seen.clear()
    assert plan._lengths_above(99, [narrow, wide], made) == [] and seen == [wide]


def test_the_context_may_be_stretched_or_the_samplers(tmp_path):
    made = trainer(tmp_path)
    made.model.config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert plan.context_length(made) == ("max_position_embeddings", 512)
    made.args.use_vllm, made.args.vllm_max_model_length = True, 100
    assert plan.context_length(made) == ("vllm_max_model_length", 100)


# Rewards


@pytest.mark.parametrize("text", [True, False], ids=["text", "messages"])
def test_a_good_reward_is_silent(tmp_path, text):
    assert not plan.check_rewards(trainer(tmp_path, right, questions(text=text)))


def test_a_reward_with_its_sign_turned_round_is_named(tmp_path):
    made = trainer(tmp_path, inverted, questions())
    (said,) = plan.check_rewards(made)
    assert said == (
        "reward function 'inverted' gives the wrong answer 'w4' more than the gold 'w3' (1 against 0, times its "
        "weight); turn its sign round"
    )
    made.reward_weights = -made.reward_weights
    assert not plan.check_rewards(made)


def test_a_reward_that_tells_nothing_apart(tmp_path):
    (said,) = plan.check_rewards(trainer(tmp_path, brevity, questions()))
    assert said.startswith("reward_funcs 'brevity' give the gold answer 'w3' no more than the wrong one 'w4', plain")
    assert not plan.check_rewards(trainer(tmp_path, [right, brevity], questions()))


def test_a_reward_that_raises_is_named_and_training_goes_on(tmp_path, capsys):
    made = trainer(tmp_path, broken, questions(GOLDS * 2), **SHORT)
    made.train()
    assert made.state.global_step == 1
    said = capsys.readouterr().out
    assert "WARNING: reward function 'broken' raised KeyError on a trial with the answer 'w3' ('gold'); mend it" in said


def test_too_few_rewards_and_a_missing_column(tmp_path):
    (said,) = plan.check_rewards(trainer(tmp_path, lambda completions, **kwargs: [1.0], questions()))
    assert "raised ValueError" in said and f"returned 1 rewards for {2 * len(plan.FORMS)} completions" in said
    (said,) = plan.check_rewards(trainer(tmp_path, right, questions(column="solution")))
    assert "raised TypeError" in said and "'answer'" in said
    (said,) = plan.check_rewards(trainer(tmp_path, right, questions(), remove_unused_columns=True))
    assert "raised TypeError" in said


def test_rewards_are_called_as_trl_calls_them(tmp_path):
    """Every argument that a training step gives is there in the trial, in the same shape."""
    calls = []

    def spy(**kwargs):
        kwargs["log_extra"]("seen", [1] * len(kwargs["completions"]))
        kwargs["log_metric"]("seen", 1.0)
        calls.append(kwargs)
        return right(kwargs["completions"], kwargs["answer"])

    made = trainer(tmp_path, spy, questions(GOLDS * 2), **SHORT)
    made.train()
    trial, step = calls
    assert set(trial) == set(step)
    for name in ("prompts", "completions", "completion_ids", "answer"):
        assert len(trial[name]) == 2 * len(plan.FORMS) and type(trial[name][0]) is type(step[name][0])
    assert trial["completions"][1] == [{"role": "assistant", "content": "#### w3"}]
    assert trial["prompts"][0] == questions()[0]["prompt"]


def test_a_trial_leaves_the_random_numbers_alone(tmp_path):
    def drawing(completions, answer, **kwargs):
        random.random(), np.random.rand(), torch.rand(1)
        return right(completions, answer)

    made = trainer(tmp_path, drawing, questions())
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert not plan.check_rewards(made)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_what_is_not_tried_is_said(tmp_path):
    async def judge(completions, **kwargs):
        raise AssertionError("it may cost money")

    made = trainer(tmp_path, [judge, brevity], questions())
    assert not plan.check_rewards(made)  # the judge may tell them apart
    assert "not checked: rewards judge (async" in plan.preflight_report(made)
    made = make(tmp_path, reward=inverted, dataset=questions())  # its rollout may bring columns of its own
    assert not plan.check_rewards(made)
    stream = trainer(tmp_path, inverted, questions().to_iterable_dataset())
    assert not warned(stream)
    assert "not checked: prompts and rewards, since train_dataset is a stream" in plan.preflight_report(stream)


@pytest.mark.parametrize(
    ("golds", "expected"),
    [
        (["18", "18.0", "4", "20"], ("18", "20")),  # of the same length
        ([18, 5], ("18", "5")),
        (["9*2=18\n#### 18", "2+2=4\n#### 4"], ("18", "4")),
        (["", "7", "8"], ("7", "8")),
        (["70000", "7", "8"], ("7", "8")),  # the first has no equal in length
        (["1,000", "1000"], None),
        (["A", "A"], None),
        ([["A"], ["B"]], None),
    ],
)
def test_gold_and_wrong_answers(golds, expected):
    found = plan.find_trial(questions(golds, "ground_truth"))
    assert (None if found is None else (found.gold, found.wrong)) == expected
    assert plan.find_trial(questions(golds, "label")) is None


@pytest.mark.parametrize("reward", sorted(REWARDS))
def test_gsm8k_rewards_are_silent(tmp_path, reward):
    rows = [{"question": f"{n} and {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in (9, 10, 4, 3)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    read = load_gsm8k(tmp_path)
    raw = read.rename_columns({"answer": "gold", "solution": "answer"})  # the hub's column, worked solutions
    for dataset in (read, raw):
        assert not plan.check_rewards(trainer(tmp_path, REWARDS[reward], dataset))


# The report


@pytest.mark.parametrize("reward", sorted(REWARDS))
def test_the_embedded_example_is_without_warnings(tmp_path, reward):
    args = config(tmp_path, per_device_train_batch_size=16, num_generations=8, max_completion_length=32)
    made = GRPOVerlTrainer(
        str(tiny.EXAMPLES / "tiny_qwen2"), REWARDS[reward], args, load_word_problems("train", size=64)
    )
    assert not warned(made)


def test_printed_once_before_the_first_step(tmp_path, capsys):
    made = trainer(tmp_path, **SHORT)
    assert "batch plan" not in capsys.readouterr().out
    made.train()
    said = capsys.readouterr().out
    assert said.count("batch plan on 1 rank(s)") == 1 and len(said[: said.index("end of a response")].splitlines()) < 20
    assert "data.train_batch_size" in said and "WARNING" not in said
    made = trainer(tmp_path, preflight=False, **SHORT)
    made.train()
    assert "batch plan" not in capsys.readouterr().out


def test_a_check_that_fails_is_a_warning(tmp_path):
    made = trainer(tmp_path, dataset=questions())
    made.processing_class.chat_template = "{{ raise_exception('no') }}"
    assert warned(made)[0].startswith("WARNING: the end of a turn could not be checked (TemplateError: no)")


def test_the_switch_is_a_boolean(tmp_path):
    with pytest.raises(ValueError, match="preflight='no' must be True or False"):
        config(tmp_path, preflight="no")
