"""Dynamic sampling: groups that teach nothing are replaced by groups of further prompts, on any number of ranks."""

import logging
import math
import tempfile

import pytest
import scoring_worker as worker
import tiny
import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from PIL import Image
from test_scoring import OWN, assert_advantages, by_hand, greedy_rows, rewards_of
from test_trainer_step import make, parameters

from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer
from grpo_ext.training.dynamic_sampling import PromptStream, groups_that_differ, redistributed

ON = {"filter_groups": True}


def number_of(row: dict) -> int:
    """Of a row's prompt, whose first word tells it apart."""
    return row["prompt"][0] - len(tiny.SPECIAL)


def groups_of(rows: list[dict]) -> list[int]:
    """The prompts of a batch's groups, each of which has one."""
    numbers = [number_of(row) for row in rows]
    assert all(len(set(numbers[i : i + worker.GROUP])) == 1 for i in range(0, len(rows), worker.GROUP))
    return numbers[:: worker.GROUP]


def counts(log: list[dict]) -> list[dict[str, float]]:
    """`filter_groups/*` of each generation."""
    return [
        {name.removeprefix("filter_groups/"): value for name, value in entry.items() if "filter_groups" in name}
        for entry in log
    ]


class Sampled:
    """A rollout that remembers what it was asked for."""

    def __init__(self):
        self.prompts = []

    def __call__(self, listed_prompts, trainer):
        self.prompts.append(listed_prompts[:: worker.GROUP])
        return tiny.fixed_rollout(listed_prompts, trainer)


def test_rewards_that_never_vary_end(tmp_path, caplog):
    """`max_num_gen_batches` tries a batch, one warning, and the batch is what the first try had."""
    rollout, model = Sampled(), tiny.model()
    trainer = make(tmp_path, model, rollout=rollout, reward=worker.constant, max_steps=2, max_num_gen_batches=3, **ON)
    before, batches = parameters(model), worker.record(trainer)
    with caplog.at_level(logging.WARNING, "grpo_ext"):
        trainer.train()
    assert len(rollout.prompts) == 6
    firsts = [[int(prompt.split()[0][1:]) for prompt in rollout.prompts[i]] for i in (0, 3)]
    assert [groups_of(rows) for rows in batches] == firsts
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert counts(log) == [{"seen": 6, "kept": 0, "tries": 3, "filled": 2}] * 2
    said = [record.getMessage() for record in caplog.records if "max_num_gen_batches" in record.getMessage()]
    assert len(said) == 1
    assert "after 3 generation batches (max_num_gen_batches) only 0 of 2 groups" in said[0]
    assert "filter_groups_metric='reward'" in said[0]
    assert torch.equal(parameters(trainer.model), before)


def test_a_flat_prompt_is_never_trained_on():
    """Of three prompts one: batches are full, kept in the order they were sampled, and the table shows the batch."""
    settings = {**ON, "max_steps": 4}
    result = worker.run({"settings": settings, "prompts": [0, 1, 2], "reward": "flat for odd"})
    assert all(set(groups_of(rows)) <= {0, 2} and len(rows) == 8 for rows in result["batches"])
    found = counts(result["log"])
    assert all(entry["kept"] == 2 and entry["filled"] == 0 for entry in found)
    assert {entry["tries"] for entry in found} >= {1, 2}  # also batches that need no further prompts
    for rows, entry in zip(result["batches"], result["log"], strict=True):
        assert_advantages(rows, by_hand(rows, "grpo", rewards_of(rows)))
        assert {row["items"] for row in rows} == {sum(len(row["completion"]) for row in rows)}
        assert entry["filter_groups/seen"] == 2 * entry["filter_groups/tries"]
    last, table = result["batches"][-1], result["table"]
    assert [int(prompt.split()[0][1:]) for prompt in table["prompt"]] == [number_of(row) for row in last]
    assert table["completion"] == tiny.tokenizer().batch_decode(
        [row["completion"] for row in last], skip_special_tokens=True
    )
    assert table["advantages"] == [row["advantage"] for row in last]
    assert torch.equal(torch.tensor(table["rewards"]["flat_for_odd"]), rewards_of(last)[:, 0])


def test_a_batch_that_needs_nothing_is_as_without_filtering():
    plain, filtered = (worker.run({"settings": {"max_steps": 2, **on}, "rollout": "tools"}) for on in ({}, ON))
    assert filtered["batches"] == plain["batches"]
    assert filtered["table"] == plain["table"]
    assert counts(filtered["log"]) == [{"seen": 2, "kept": 2, "tries": 1, "filled": 0}] * 2


def test_what_is_missing_is_filled(tmp_path):
    """Kept groups come first, then dropped ones in the order they were sampled."""
    settings = {**ON, "max_num_gen_batches": 2, "shuffle_dataset": False}
    rollout = Sampled()
    result = worker.run(
        {"settings": settings, "prompts": [1, 3, 2, 5, 7, 9, 11, 13], "rows": 16, "reward": "flat for odd"},
        rollout_func=rollout,
    )
    tries = [int(prompt.split()[0][1:]) for prompts in rollout.prompts for prompt in prompts]
    assert tries[:4] == [1, 3, 2, 5] and len(tries) == 8
    kept, others = ([n for n in tries if (n % 2 == 0) == even] for even in (True, False))
    (rows,) = result["batches"]
    assert groups_of(rows) == (kept + others)[:4]
    assert counts(result["log"]) == [{"seen": 8, "kept": len(kept), "tries": 2, "filled": 4 - len(kept)}]


def test_the_tables_own_columns_are_the_batchs():
    """Also those that only some tries have."""
    calls = 0

    def reward(prompts, completion_ids, log_extra, **kwargs):
        nonlocal calls
        calls += 1
        if calls > 1:
            log_extra("tokens", [len(ids) for ids in completion_ids])
        return worker.flat_for_odd(prompts, completion_ids)

    with tempfile.TemporaryDirectory() as folder:
        settings = {**ON, "shuffle_dataset": False, "max_num_gen_batches": 2}
        trainer = worker.make({"settings": settings, "prompts": [2, 1, 3, 5]}, folder, reward_funcs=reward)
        batches = worker.record(trainer)
        trainer.train()
    (rows,) = batches
    assert groups_of(rows)[0] == 2
    first_try = [number_of(row) in (1, 2) for row in rows]
    tokens = [None if first else len(row["completion"]) for first, row in zip(first_try, rows, strict=True)]
    assert list(trainer._logs["extra"]["tokens"]) == tokens


# What has to differ


def test_penalties_do_not_make_a_group_differ():
    """Prompts whose responses are all wrong differ in length and in their KL, and are dropped all the same."""
    shaped = {"overlong_buffer_len": 20, "use_kl_in_reward": True, "kl_coef": 0.1}
    result = worker.run({"settings": {**ON, **shaped, "max_steps": 3}, "prompts": [0, 1, 2, 8], "reward": "acc"})
    kept = {number for rows in result["batches"] for number in groups_of(rows)}
    assert kept <= {2, 8}  # of prompt 0 no response begins with an odd token
    assert all(entry["filter_groups/filled"] == 0 for entry in result["log"])
    assert any(entry["reward_overlong/mean"] < 0 for entry in result["log"])
    # ... and they are taken off the rewards of those that are kept
    plain = worker.run({"settings": {**ON, "max_steps": 3}, "prompts": [0, 1, 2, 8], "reward": "acc"})
    assert [groups_of(rows) for rows in plain["batches"]] == [groups_of(rows) for rows in result["batches"]]
    assert plain["batches"] != result["batches"]


@pytest.mark.parametrize(("metric", "kept"), [("acc", {2}), ("length_reward", {1, 2}), ("reward", {1, 2})])
def test_the_metric_is_a_reward_function_by_its_name(metric, kept):
    """`acc` differs for one prompt, the length and therefore the sum for both."""
    settings = {**ON, "filter_groups_metric": metric, "max_steps": 3}
    result = worker.run({"settings": settings, "prompts": [1, 2], "reward": "acc and length"})
    assert {number for rows in result["batches"] for number in groups_of(rows)} == kept
    for rows in result["batches"]:
        numbers = [f"w{number_of(row)}" for row in rows]
        right = worker.acc(numbers, [row["completion"] for row in rows])
        total = rewards_of(rows)[:, 0] + torch.tensor(right)
        assert_advantages(rows, by_hand(rows, "grpo", total[:, None]))


def test_groups_that_differ():
    nan = math.nan
    values = torch.tensor([0.7, 0.7, 0.7, 0.7, 0.7, 0.1, 0.7, nan, nan, nan, 0.0, 1.0, nan, nan, nan])
    assert groups_that_differ(values, 3) == [False, True, False, True, False]


# Further prompts


def as_stream(dataset: Dataset) -> IterableDataset:
    rows = dataset.to_list()
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize("kind", [as_stream, Dataset.to_iterable_dataset])
def test_a_stream_of_prompts(kind):
    result = worker.run(
        {"settings": {**ON, "max_steps": 4}, "reward": "flat for odd"}, train_dataset=kind(tiny.prompts(3))
    )
    assert all(set(groups_of(rows)) <= {0, 2} and len(rows) == 8 for rows in result["batches"])
    assert any(entry["tries"] > 1 for entry in counts(result["log"]))


@pytest.mark.parametrize("kind", [lambda data: data, as_stream], ids=["data set", "stream"])
def test_further_prompts_are_epochs_that_can_be_taken_up(kind):
    data = kind(tiny.prompts(5))
    stream = PromptStream(data, seed=1)
    taken = [row["number"] for row in stream.take(15)]
    epochs = [taken[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [row["number"] for row in PromptStream(data, seed=2).take(15)] != taken
    for read in (0, 3, 5, 7):
        part = PromptStream(data, seed=1)
        part.take(read)
        again = PromptStream(data, seed=1)
        again.load_state(part.state())
        assert [row["number"] for row in again.take(15 - read)] == taken[read:]
        again.load_state(None)
        assert again.take(1)[0]["number"] == taken[0]
    assert PromptStream(data, seed=1, columns=["prompt", "image"]).take(1)[0].keys() == {"prompt"}
    with pytest.raises(ValueError, match="train_dataset is empty"):
        PromptStream(kind(tiny.prompts(5).select([])), seed=1).take(1)


def test_a_second_training_begins_anew(tmp_path):
    def prompts():
        rollout.prompts.clear()
        trainer.train()
        return list(rollout.prompts)

    rollout = Sampled()
    trainer = make(tmp_path, rollout=rollout, reward=worker.constant, max_num_gen_batches=2, **ON)
    assert prompts() == prompts()


def test_the_columns_of_further_prompts_reach_the_reward(tmp_path):
    seen = []

    def reward(prompts, completion_ids, number, **kwargs):
        assert [int(prompt.split()[0][1:]) for prompt in prompts] == number
        seen.extend(number)
        return worker.constant(completion_ids)

    make(tmp_path, reward=reward, max_num_gen_batches=4, **ON).train()
    assert len(seen) == 32


# Two ranks: 3 prompts, 6 rows each, so that one group lies across

ON_TWO = {
    "reward": {"reward": "flat for odd"},
    "acc": {
        "reward": "acc and length",
        "settings": {"filter_groups_metric": "acc", "adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True},
    },
    "filled": {"reward": "constant", "settings": {"max_num_gen_batches": 3}},
}
ON_TWO = {
    name: {
        "rows": 12,
        "prompts": list(range(12)),
        "rollout": "tools",
        **job,
        "settings": {**ON, "max_steps": 2, **job.get("settings", {})},
    }
    for name, job in ON_TWO.items()
}


OWN_SAMPLES = {"settings": {**OWN["settings"], **ON, "adv_estimator": "remax"}, "rollout": None, "rows": 12}
OWN_SAMPLES |= {"reward": "flat for odd", "prompts": list(range(12))}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return worker.run_on_two_ranks({**ON_TWO, "own samples": OWN_SAMPLES}, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_keep_the_same_groups(two_ranks, name):
    result, whole = two_ranks[name], worker.run(ON_TWO[name])
    assert counts(result["log"]) == counts(whole["log"])
    assert any(entry["tries"] > 1 for entry in counts(result["log"]))
    for rows, expected in zip(result["batches"], whole["batches"], strict=True):
        assert len(rows) == 12
        for field in ("prompt", "completion", "mask", "items"):
            assert [row[field] for row in rows] == [row[field] for row in expected], field
        for row, wanted in zip(rows, expected, strict=True):
            assert row["advantage"] == pytest.approx(wanted["advantage"], rel=1e-4, abs=1e-5)
    for column in ("prompt", "completion"):
        assert result["table"][column] == whole["table"][column]
    for metric in ("reward", "actor/reward_kl_penalty"):
        for entry, wanted in zip(result["log"], whole["log"], strict=True):
            assert entry.get(metric, 0) == pytest.approx(wanted.get(metric, 0), rel=1e-4)


def test_greedy_baselines_follow_the_groups(two_ranks):
    """Of the prompts that were kept; ranks sample with seeds of their own, so that each run stands for itself."""
    for result in (two_ranks["own samples"], worker.run(OWN_SAMPLES)):
        (rows,) = result["batches"]
        assert len(rows) == 12 and not any(number % 2 for number in groups_of(rows))
        assert counts(result["log"])[0]["tries"] > 1
        baselines = rewards_of(greedy_rows(rows))[:, 0]
        assert_advantages(rows, by_hand(rows, "remax", rewards_of(rows), reward_baselines=baselines))


# Refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filter_groups_metric": "acc"}, "filter_groups_metric='acc' has no effect with filter_groups=False"),
        ({"max_num_gen_batches": 3}, "max_num_gen_batches=3 has no effect with filter_groups=False"),
        # verl's "no limit": a run whose rewards never vary would not end
        ({**ON, "max_num_gen_batches": 0}, "max_num_gen_batches=0 must be a whole number of at least 1"),
        ({**ON, "max_num_gen_batches": -1}, "max_num_gen_batches=-1 must be a whole number of at least 1"),
        ({**ON, "max_num_gen_batches": 2.5}, "max_num_gen_batches=2.5 must be a whole number of at least 1"),
        ({"filter_groups": "yes"}, "filter_groups='yes' must be True or False"),
    ],
)
def test_bad_settings(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOVerlConfig(str(tmp_path), use_cpu=True, **settings)


def test_an_unknown_metric(tmp_path):
    rewards = [worker.acc, tiny.length_reward]
    with pytest.raises(ValueError, match="'f1' is no reward function; choose 'reward' or one of acc, length_reward"):
        make(tmp_path, reward=rewards, filter_groups_metric="f1", **ON)


def test_images_are_refused_before_a_model_is_loaded(tmp_path):
    data = Dataset.from_dict({"prompt": ["w1"] * 8, "image": [Image.new("RGB", (2, 2))] * 8})
    args = GRPOVerlConfig(str(tmp_path), use_cpu=True, per_device_train_batch_size=8, **ON)
    with pytest.raises(ValueError, match="filter_groups=True cannot carry images, and train_dataset has a column 'im"):
        GRPOVerlTrainer("no/such-model", worker.constant, args, data)


def test_tries_that_hold_different_things():
    tries = [{"completion_ids": torch.ones(2, 3)}, {"completion_ids": torch.ones(2, 3), "tool_mask": torch.ones(2, 3)}]
    with pytest.raises(ValueError, match=r"differ in \['tool_mask'\]; the rollout must return the same fields"):
        redistributed(tries, [(0, 0), (1, 1)], Accelerator(cpu=True))
