"""What TRL offers beside the loss still works, and enters the objective where it should."""

import copy
import dataclasses
import inspect
import json
import re

import pytest
import tiny
import torch
from datasets import IterableDataset
from test_trainer_step import LR, Recorder, log_probs_and_entropy, make, padded, parameters, relative_gap, rows_of
from transformers import MixtralConfig, MixtralForCausalLM
from trl import GRPOTrainer

from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer, ObjectiveConfig, ppo_loss
from grpo_ext.objective import BatchInfo
from grpo_ext.training.windows import take_rows, trimmed


def test_the_constructor_is_trls():
    ours, trls = (list(inspect.signature(cls.__init__).parameters) for cls in (GRPOVerlTrainer, GRPOTrainer))
    assert ours == trls


def config(tmp_path, **settings):
    return GRPOVerlConfig(str(tmp_path), use_cpu=True, report_to=[], **settings)


def test_a_config_can_be_copied_and_read_back(tmp_path):
    made = config(tmp_path, clip_ratio_high=0.28, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    assert dataclasses.replace(made, clip_ratio_c=5.0).clip_ratio_c == 5.0
    record = json.loads(json.dumps({k: v for k, v in made.to_dict().items() if not k.endswith("_token")}))
    again = GRPOVerlConfig(**record)
    assert (again.clip_ratio_high, again.steps_per_generation, again.generation_batch_size) == (0.28, 4, 16)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 0},
        {"per_device_train_batch_size": -1},
        {"steps_per_generation": 0},
        {"num_generations": 4.0},
        {"num_iterations": 0},
        {"max_nonfinite_steps": "3"},
        {"max_tokens_per_forward": 0},
        {"generation_batch_size": -1},
        {"num_generations_eval": 0},
    ],
)
def test_counts_are_whole_numbers_from_one(tmp_path, settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))} must be a whole number of at least 1"):
        config(tmp_path, **settings)


def test_switches_are_booleans_and_weights_are_numbers(tmp_path):
    with pytest.raises(ValueError, match="norm_adv_by_std_in_grpo='False' must be True or False"):
        config(tmp_path, norm_adv_by_std_in_grpo="False")
    with pytest.raises(ValueError, match=r"reward_weights=\[nan\] must be finite"):
        config(tmp_path, reward_weights=[float("nan")])


def test_a_column_that_reward_functions_cannot_get_is_refused(tmp_path):
    dataset = tiny.prompts().rename_column("number", "completions")
    with pytest.raises(ValueError, match="column 'completions'.*rename_column"):
        make(tmp_path, dataset=dataset)


@pytest.mark.parametrize("shape", ["token", "sequence"])
def test_the_samplers_importance_ratio_weighs_the_policy_loss(tmp_path, monkeypatch, shape):
    """vLLM's ratio, `(B, T)` or `(B, 1)`, becomes `rollout_is_weights`."""
    generate = GRPOTrainer._generate_and_score_completions

    def with_ratio(self, inputs):
        batch = generate(self, inputs)
        ids = batch["completion_ids"]
        ratio = 0.5 + (ids % 3).float() if shape == "token" else 0.5 + (ids[:, :1] % 3).float()
        return {**batch, "importance_sampling_ratio": ratio}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", with_ratio)
    model = tiny.model()
    start = copy.deepcopy(model)
    trainer = make(tmp_path, model, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    trainer.train()
    rows = rows_of(trainer)
    expected = copy.deepcopy(start).double()
    scored = [log_probs_and_entropy(expected, row["prompt_ids"], row["completion_ids"])[0] for row in rows]
    ids = padded([torch.tensor(row["completion_ids"]) for row in rows])
    mask = padded([torch.ones(len(row["completion_ids"])) for row in rows])
    ratio = (0.5 + (ids % 3)).double()
    log_prob = padded(scored)
    loss, _ = ppo_loss(
        log_prob,
        log_prob.detach(),
        torch.tensor([row["advantage"] for row in rows], dtype=torch.float64),
        mask,
        config=ObjectiveConfig(),
        batch_info=BatchInfo(1, mask.sum(), len(rows)),
        rollout_is_weights=ratio if shape == "token" else ratio[:, :1],
    )
    loss.backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter -= LR * parameter.grad
    assert relative_gap(trainer.model, expected, start) < 1e-5


def test_a_stream_of_prompts_trains_like_a_data_set(tmp_path):
    rows = tiny.prompts().to_list()
    stream = IterableDataset.from_generator(lambda: iter(rows))
    streamed = make(tmp_path, tiny.model(), dataset=stream, max_steps=3, shuffle_dataset=False)
    streamed.train()
    mapped = make(tmp_path, tiny.model(), max_steps=3, shuffle_dataset=False)
    mapped.train()
    assert torch.equal(parameters(streamed.model), parameters(mapped.model))


def mixture(seed: int = 0) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            router_aux_loss_coef=0.5,
            output_router_logits=True,
        )
    )


def test_the_auxiliary_loss_of_a_mixture_of_experts_is_added(tmp_path):
    """With all advantages 0 the gradient is the auxiliary loss's alone."""

    def flat(completions, **kwargs):
        return [1.0] * len(completions)

    start = mixture()
    trainer = make(tmp_path, mixture(), reward=flat, per_device_train_batch_size=8, forward_layout="grouped")
    recorder = Recorder()
    trainer.add_callback(recorder)
    trainer.train()
    moved = parameters(trainer.model) - parameters(start)
    assert moved.norm() > 1e-4
    routers = sum(
        (a - b).norm().item()
        for (name, a), b in zip(trainer.model.named_parameters(), start.parameters(), strict=True)
        if "gate" in name
    )
    assert routers > 0
    assert recorder.steps[0]["aux_loss"] > 0
    assert recorder.steps[0]["perf/skipped_row_fraction"] == 0

    padded_run = make(tmp_path, mixture(), reward=flat, per_device_train_batch_size=8, forward_layout="padded")
    padded_run.train()
    # The auxiliary loss depends on which rows share a forward: close, and not equal
    cosine = torch.nn.functional.cosine_similarity(moved, parameters(padded_run.model) - parameters(start), dim=0)
    assert cosine > 0.9


def test_images_stay_with_their_rows():
    """Rows chosen from a batch take their own images along, however many each has."""
    from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

    grids = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 2]])  # 4, 8 and 8 patches
    patches = torch.arange(20.0)[:, None]
    batch = {
        "prompt_ids": torch.arange(6).view(3, 2),
        "completion_ids": torch.arange(9).view(3, 3),
        "pixel_values": patches,
        "image_grid_thw": grids,
        "num_images": [1, 0, 2],
        "advantages": torch.tensor([1.0, 2.0, 3.0]),
        "num_items_in_batch": torch.tensor(9),
    }
    taken = unsplit_pixel_values_by_grid(take_rows(split_pixel_values_by_grid(batch), [2, 0]))
    assert taken["num_images"] == [2, 1]
    assert taken["image_grid_thw"].tolist() == [[1, 2, 4], [1, 4, 2], [1, 2, 2]]
    assert taken["pixel_values"][:, 0].tolist() == [*range(4, 20), *range(4)]
    assert taken["advantages"].tolist() == [3.0, 1.0]
    assert taken["num_items_in_batch"] == 9


def test_trimming_cuts_padding_only():
    from grpo_ext.training.layout import RowLength

    batch = {
        "prompt_ids": torch.tensor([[0, 0, 5], [0, 6, 7]]),
        "completion_ids": torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]]),
        "old_per_token_logps": torch.zeros(2, 4),
        "importance_sampling_ratio": torch.ones(2, 1),
        "advantages": torch.zeros(2),
    }
    cut = trimmed(batch, [RowLength(1, 2), RowLength(2, 1)])
    assert cut["prompt_ids"].tolist() == [[0, 5], [6, 7]]
    assert cut["completion_ids"].tolist() == [[1, 2], [3, 0]]
    assert cut["old_per_token_logps"].shape == (2, 2)
    assert cut["importance_sampling_ratio"].shape == (2, 1)
