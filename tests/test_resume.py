"""A run that is interrupted and resumed gives the prompts, completions and parameters of one that is not, bit for bit.

Completions are sampled from the model, so that the random state matters; AdamW's state and a decaying learning rate
matter too. By default a generation lasts two optimizer steps and an epoch four.
"""

import functools
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import resume_worker as worker
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_ext.training.checkpoints import MARKER, last_usable, make_room, remove_older, write_marker
from grpo_ext.training.logbook import read_log

VARIANTS = {
    "two steps per generation": {},
    "num_iterations": {"num_iterations": 2},
    "both, shuffled": {"num_iterations": 2, "max_steps": 6, "shuffle_mini_batches": True},
    "stream": {"stream": True},
    "lora": {"kind": "lora", **worker.KL},
    "full": {"kind": "full", **worker.KL},
    "adapter": {"kind": "adapter", **worker.KL},
    "filtered": worker.FILTERED,
    "filtered stream": {"stream": True, **worker.FILTERED},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By variant: the folder of an uninterrupted run, with a checkpoint of each step, and its outcome."""

    @functools.cache
    def run(variant: str):
        out = tmp_path_factory.mktemp("whole")
        trainer = worker.trainer(out, **VARIANTS[variant])
        trainer.train()
        return out, worker.outcome(trainer)

    return run


def resume(out, resume_from, **settings):
    trainer = worker.trainer(out, **settings)
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer


def assert_goes_on_as(whole_run, trainer, out, step: int) -> None:
    """The run that was resumed after `step` saw the rest of what the whole one saw, and ended as it did."""
    folder, outcome = whole_run
    assert worker.records(out) == [entry for entry in worker.records(folder) if entry["step"] >= step]
    assert worker.differences(outcome, worker.outcome(trainer)) == []


@pytest.mark.parametrize(
    ("variant", "step"),
    [
        ("two steps per generation", 1),  # inside a generation cycle
        ("two steps per generation", 2),
        ("two steps per generation", 4),  # between two epochs
        ("two steps per generation", 7),  # inside a cycle of the second epoch
        ("two steps per generation", 10),  # after the last step
        ("num_iterations", 3),
        ("num_iterations", 8),
        ("both, shuffled", 3),
        ("stream", 3),
        ("stream", 4),
        ("stream", 6),
        ("stream", 9),
        ("lora", 3),
        ("lora", 6),
        ("full", 3),
        ("full", 6),
        ("adapter", 3),
        ("adapter", 6),
        ("filtered", 3),
        ("filtered", 6),
        ("filtered stream", 4),
    ],
)
def test_resumed_is_uninterrupted(whole, tmp_path, variant, step):
    folder, _ = whole(variant)
    trainer = resume(tmp_path, str(folder / f"checkpoint-{step}"), **{**VARIANTS[variant], "save_strategy": "no"})
    assert_goes_on_as(whole(variant), trainer, tmp_path, step)


def test_the_runs_can_tell_a_difference(whole):
    """Epochs differ in their order, steps in their completions, and the model moves: else the tests above are empty."""
    folder, outcome = whole("two steps per generation")
    seen = worker.records(folder)
    assert [entry["step"] for entry in seen] == [0, 2, 4, 6, 8]
    assert len({tuple(entry["prompts"]) for entry in seen}) == 5
    assert len({json.dumps(entry["completions"]) for entry in seen}) == 5
    lengths = {len(ids) for entry in seen for ids in entry["completions"]}
    assert len(lengths) > 1
    assert worker.differences(outcome, dict(worker.policy("full").named_parameters()))


def test_filtered_runs_read_on_and_move_their_coefficient(whole):
    """Before and after the steps they are resumed at; else there is nothing to restore."""
    folder, _ = whole("filtered")
    tries = [entry["step"] for entry in worker.records(folder)]
    assert tries.count(0) > 1 and max(tries.count(6), tries.count(8)) > 1
    log = json.loads((folder / "checkpoint-10" / "trainer_state.json").read_text())["log_history"]
    name = "actor/reward_kl_penalty_coeff"
    assert len({entry[name] for entry in log if name in entry}) == 5


def test_saving_changes_nothing(whole, tmp_path):
    trainer = worker.trainer(tmp_path, save_strategy="no")
    trainer.train()
    assert_goes_on_as(whole("two steps per generation"), trainer, tmp_path, 0)


def test_resumed_twice_and_from_the_last(whole, tmp_path):
    """`True` takes the newest checkpoint by its number, also where names would sort otherwise (10 before 9)."""
    folder, _ = whole("two steps per generation")
    shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    first = worker.trainer(tmp_path, max_steps=10)
    first.add_callback(_StopAt(5))
    first.train(resume_from_checkpoint=True)
    assert first.state.global_step == 5
    assert_goes_on_as(whole("two steps per generation"), resume(tmp_path, True), tmp_path, 3)
    again = resume(tmp_path, True)
    assert again.state.global_step == 10
    assert worker.differences(whole("two steps per generation")[1], worker.outcome(again)) == []


class _StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


# Checkpoints that cannot be resumed


def _without_marker(folder):
    (folder / MARKER).unlink()


def _marker_cut(folder):
    os.truncate(folder / MARKER, 40)


def _state_cut(folder):
    path = folder / "grpo_ext_state_0.pt"
    os.truncate(path, path.stat().st_size // 2)


def _optimizer_cut(folder):
    path = folder / "optimizer.pt"
    os.truncate(path, path.stat().st_size - 1)


def _weights_gone(folder):
    (folder / "model.safetensors").unlink()


def _of_two_ranks(folder):
    facts = json.loads((folder / MARKER).read_text())
    facts["geometry"]["ranks"] = 2
    (folder / MARKER).write_text(json.dumps(facts))


def _of_other_batches(folder):
    facts = json.loads((folder / MARKER).read_text())
    facts["geometry"]["per_device_train_batch_size"] = 1
    (folder / MARKER).write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_marker, "checkpoint-3 has no grpo_ext_complete.json"),
        (_marker_cut, "checkpoint-3 has no grpo_ext_complete.json"),
        (_state_cut, "checkpoint-3/grpo_ext_state_0.pt was cut short"),
        (_optimizer_cut, "checkpoint-3/optimizer.pt was cut short"),
        (_weights_gone, r"checkpoint-3 has lost 1 of its files \(first: model.safetensors\)"),
        (_of_two_ranks, "checkpoint-3 cannot be resumed exactly: ranks 2 then, 1 now"),
        (_of_other_batches, "checkpoint-3 lies inside a generation cycle .* per_device_train_batch_size 1 then, 2 now"),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed(whole, tmp_path, caplog, spoil, message):
    """Named, it is an error before anything is loaded; else the one before is taken, and the reason is said."""
    folder, _ = whole("two steps per generation")
    for step in (2, 3):
        shutil.copytree(folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    spoil(tmp_path / "checkpoint-3")
    trainer = worker.trainer(tmp_path, save_strategy="no")
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    with caplog.at_level(logging.WARNING, "grpo_ext"):
        trainer.train(resume_from_checkpoint=True)
    assert "resuming from checkpoint-2 instead" in caplog.text
    assert_goes_on_as(whole("two steps per generation"), trainer, tmp_path, 2)


def test_a_state_that_is_no_state(whole, tmp_path):
    """Of the right size and unreadable: one error with the file's name."""
    folder, _ = whole("two steps per generation")
    copy = Path(shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3"))
    path = copy / "grpo_ext_state_0.pt"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ValueError, match="grpo_ext_state_0.pt cannot be read"):
        resume(tmp_path, str(copy))


def test_other_batches_between_cycles_are_a_warning(whole, tmp_path, caplog):
    folder, _ = whole("two steps per generation")
    with caplog.at_level(logging.WARNING, "grpo_ext"):
        trainer = resume(
            tmp_path,
            str(folder / "checkpoint-2"),
            save_strategy="no",
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            steps_per_generation=2,
        )
    assert "so the run goes on differently" in caplog.text
    assert trainer.state.global_step == 4
    assert [entry["step"] for entry in worker.records(tmp_path)] == [2]


def test_a_checkpoint_of_plain_trl(whole, tmp_path, caplog):
    folder, _ = whole("two steps per generation")
    shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-2")
    settings = {**worker.SETTINGS, "max_steps": 3, "save_steps": 3, "bf16": False}
    data = Dataset.from_dict({"prompt": ["w1 w2", "w3", "w4", "w5"]})
    GRPOTrainer(
        worker.policy("full"),
        lambda completions, **kwargs: [0.0] * len(completions),
        GRPOConfig(str(tmp_path), **settings),
        data,
        processing_class=worker.tiny.tokenizer(),
    ).train()
    assert (tmp_path / "checkpoint-3").is_dir()
    with pytest.raises(ValueError, match="checkpoint-3 has no grpo_ext_complete.json: .* another trainer"):
        resume(tmp_path, str(tmp_path / "checkpoint-3"), save_strategy="no")
    with caplog.at_level(logging.WARNING, "grpo_ext"):
        trainer = resume(tmp_path, True, save_strategy="no")
    assert "resuming from checkpoint-2 instead" in caplog.text
    assert_goes_on_as(whole("two steps per generation"), trainer, tmp_path, 2)


def test_nothing_to_resume_from(tmp_path):
    trainer = worker.trainer(tmp_path, save_only_model=True, max_steps=1)
    with pytest.raises(ValueError, match="no complete checkpoint to resume from, start anew$"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="nowhere is no folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="start anew; .*checkpoint-1 has no .* save_only_model=True"):
        trainer.train(resume_from_checkpoint=True)


# There is always a complete checkpoint


def _checkpoint(output_dir: Path, step: int, *, complete: bool = True, age: float = 0.0) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("1")
    if complete:
        write_marker(folder, {"step": step})
    stamp = folder.stat().st_mtime - age
    os.utime(folder, (stamp, stamp))
    return folder


def _names(output_dir: Path) -> set[str]:
    return {path.name for path in output_dir.iterdir()}


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (None, {"checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"}),
        (3, {"checkpoint-2", "checkpoint-4", "checkpoint-6"}),
        (2, {"checkpoint-4", "checkpoint-6"}),
        (1, {"checkpoint-6"}),
    ],
)
def test_the_checkpoint_just_written_is_kept(tmp_path, limit, kept):
    """Also beside one of a later step that was cut short, within a second, which the Trainer takes for the newest."""
    _checkpoint(tmp_path, 2, age=0.2)
    _checkpoint(tmp_path, 4, age=0.1)
    _checkpoint(tmp_path, 8, complete=False)
    remove_older(_checkpoint(tmp_path, 6), limit, None)
    assert _names(tmp_path) == kept


def test_the_best_checkpoint_is_kept(tmp_path):
    for step in (2, 4, 6):
        newest = _checkpoint(tmp_path, step)
    remove_older(newest, 1, str(tmp_path / "checkpoint-2"))
    assert _names(tmp_path) == {"checkpoint-2", "checkpoint-6"}


def test_a_complete_checkpoint_of_the_same_step_stays_until_it_is_replaced(tmp_path):
    folder = _checkpoint(tmp_path, 4)
    make_room(folder)
    assert last_usable(str(tmp_path)).name == "checkpoint-4-replaced"
    folder.mkdir()
    (folder / "weights").write_text("2")  # ... and a kill
    make_room(folder)
    assert not folder.exists()
    assert last_usable(str(tmp_path)).name == "checkpoint-4-replaced"
    folder = _checkpoint(tmp_path, 4)
    assert last_usable(str(tmp_path)) == folder
    remove_older(folder, None, None)
    assert _names(tmp_path) == {"checkpoint-4"}


def test_no_moment_without_a_complete_checkpoint(tmp_path, monkeypatch):
    """With `save_total_limit=1`: looked at before and after whatever saving does to files."""
    moments = 0

    def watched(real):
        def call(*args, **kwargs):
            nonlocal moments
            begun = any(tmp_path.glob(f"*/{MARKER}"))
            if begun:
                last_usable(str(tmp_path))
            answer = real(*args, **kwargs)
            if begun:
                moments += 1
                last_usable(str(tmp_path))
            return answer

        return call

    for module, name in ((torch, "save"), (os, "replace"), (os, "rename"), (os, "unlink"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    trainer = worker.trainer(tmp_path, save_total_limit=1, max_steps=3)
    trainer.train()
    trainer._save_checkpoint(trainer.model, None)  # the same step once more, as at the end of an epoch
    assert moments > 20
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-3"}


# Kills


@pytest.mark.parametrize(("kills", "seed"), [(5, 0), pytest.param(20, 1, marks=pytest.mark.slow)])
def test_killed_over_and_over(tmp_path, kills, seed):
    """SIGKILL at random times and inside saving, `save_total_limit=1`: in the end nothing differs."""
    settings = {"save_total_limit": 1, "max_steps": 10}
    printed = worker.launch([{"out": str(tmp_path), "kills": kills, "seed": seed, "settings": settings}])
    attempts = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert printed.count('{"kill": ') == kills
    assert any(attempt["resumed"] for attempt in attempts)
    whole = tmp_path / "whole"
    assert worker.differences(worker.result(whole)["outcome"], worker.result(tmp_path)["outcome"]) == []
    expected = {entry["step"]: entry for entry in worker.records(whole)}
    seen = worker.records(tmp_path)
    assert {entry["step"] for entry in seen} == set(expected)
    assert all(entry == expected[entry["step"]] for entry in seen)

    def log(folder):
        keep = ("step", "loss", "grad_norm", "learning_rate", "reward", "entropy", "actor/ppo_kl")
        return [{name: entry.get(name) for name in keep} for entry in read_log(folder / "log.jsonl") if "loss" in entry]

    assert log(tmp_path) == log(whole)


# Several ranks

ON_TWO = {"per_device_train_batch_size": 1, "max_steps": 6}


def assert_ranks_agree_with(whole: Path, resumed: Path, step: int) -> None:
    for rank in (0, 1):
        expected = [entry for entry in worker.records(whole, rank) if entry["step"] >= step]
        assert worker.records(resumed, rank) == expected
        left, right = worker.result(whole, rank), worker.result(resumed, rank)
        assert left["error"] is None and right["error"] is None
        assert worker.differences(left["outcome"], right["outcome"]) == []


def test_resumed_on_two_ranks(tmp_path):
    """DDP, in the middle of a generation cycle of the second epoch."""
    settings = {**ON_TWO, **worker.KL}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    worker.launch(
        [
            {"out": str(whole), "settings": settings},
            {
                "out": str(resumed),
                "settings": {**settings, "save_strategy": "no"},
                "resume": str(whole / "checkpoint-5"),
            },
        ],
        ranks=2,
    )
    assert worker.records(whole, 0) != worker.records(whole, 1)
    assert_ranks_agree_with(whole, resumed, 5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [{}, {"zero": 2}, {"zero": 3}], ids=["ddp", "zero2", "zero3"])
def test_a_rank_is_killed_and_all_are_resumed(tmp_path, backend):
    """Rank 1 is killed while it saves; other processes go on from the checkpoint before, and from steps 1 and 5."""
    settings = {**ON_TWO, **worker.KL, **backend}
    kinds = ("full", "lora", "adapter")
    whole = {kind: tmp_path / kind for kind in kinds}
    worker.launch([{"out": str(whole[kind]), "kind": kind, "settings": settings} for kind in kinds], ranks=2)

    killed = {"out": str(tmp_path / "killed"), "settings": settings}
    kill = {"rank": 1, "call": "save", "count": 10}  # two calls for a checkpoint, more under ZeRO
    worker.launch([{**killed, "kill": kill}], ranks=2, fails=True)
    last = int(last_usable(killed["out"]).name.removeprefix("checkpoint-"))
    assert (tmp_path / "killed" / f"checkpoint-{last + 1}").is_dir()
    before = [len(worker.records(killed["out"], rank)) for rank in (0, 1)]

    resumed = [
        {
            "out": str(tmp_path / f"{kind} from {step}"),
            "kind": kind,
            "settings": {**settings, "save_strategy": "no"},
            "resume": str(whole[kind] / f"checkpoint-{step}"),
        }
        for kind in kinds
        for step in (1, 5)
    ]
    worker.launch([{**killed, "resume": True}, *resumed], ranks=2)
    for kind in kinds:
        for step in (1, 5):
            assert_ranks_agree_with(whole[kind], tmp_path / f"{kind} from {step}", step)
    for rank in (0, 1):
        expected = worker.records(whole["full"], rank)
        seen = worker.records(killed["out"], rank)[before[rank] :]
        assert seen == [entry for entry in expected if entry["step"] >= last]
        left, right = worker.result(whole["full"], rank), worker.result(killed["out"], rank)
        assert left["error"] is None and right["error"] is None
        assert worker.differences(left["outcome"], right["outcome"]) == []
