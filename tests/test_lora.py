"""Adapters: new ones, saved ones trained further, their reference, their dropout, saving them, merging them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo_ext import GRPOVerlConfig, GRPOVerlTrainer, StepMetricsCallback, merge
from grpo_ext.training import adapters


class Recorder(StepMetricsCallback):
    def __init__(self):
        self.steps = []

    def on_step_metrics(self, args, state, control, metrics, **kwargs):
        self.steps.append(metrics)


def lora(**settings) -> LoraConfig:
    """An adapter that is not the identity: its second factor would begin at 0."""
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **settings})


def make(folder, model, peft_config=None, **settings):
    """A trainer of fixed responses, and the metrics of its steps."""
    args = GRPOVerlConfig(
        str(folder),
        **{
            **tiny.SETTINGS,
            "per_device_train_batch_size": 8,
            "max_steps": 2,
            "learning_rate": 0.05,
            **settings,
        },
    )
    trainer = GRPOVerlTrainer(
        model,
        tiny.length_reward,
        args,
        tiny.prompts(),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout,
        peft_config=peft_config,
    )
    recorder = Recorder()
    trainer.add_callback(recorder)
    return trainer, recorder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base model's folder and the folder of an adapter of it, with dropout."""
    folder = tmp_path_factory.mktemp("saved")
    base, adapter = str(folder / "base"), str(folder / "adapter")
    tiny.model().save_pretrained(base)
    torch.manual_seed(3)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora(lora_dropout=0.3))
    model.save_pretrained(adapter)
    return base, adapter


def load(base, adapter, **settings) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, **settings)


def weights(model, adapter="default") -> dict[str, torch.Tensor]:
    """The parameters of one adapter, or the base model's (`adapter=None`), by name."""
    return {
        name.replace(f".{adapter}.", ".").removeprefix("module."): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if (f".{adapter}." in name if adapter else "lora_" not in name)
    }


def same(one: dict, other: dict) -> bool:
    assert one and one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=torch.arange(6, 30).view(2, 12)).logits


# Training


def test_a_new_adapter_is_trained_and_its_base_model_is_the_reference(tmp_path, saved):
    base, _ = saved
    trainer, recorder = make(tmp_path, base, LoraConfig(r=4, target_modules="all-linear"), use_kl_loss=True)
    trained, frozen = weights(trainer.model), weights(trainer.model, None)
    trainer.train()
    assert not same(weights(trainer.model), trained)
    assert same(weights(trainer.model, None), frozen)
    first, second = (step["actor/kl_loss"] for step in recorder.steps)
    assert first == 0.0 and second > 1e-4


@pytest.mark.parametrize("given", ["path", "object"])
def test_a_saved_adapter_is_trained_further_against_a_frozen_copy_of_itself(tmp_path, saved, given):
    base, adapter = saved
    model = adapter if given == "path" else load(base, adapter, is_trainable=True)
    trainer, recorder = make(tmp_path, model, use_kl_loss=True, kl_loss_coef=0.1)
    start, frozen = weights(load(base, adapter)), weights(trainer.model, None)
    assert isinstance(trainer.model, PeftModel)
    assert same(weights(trainer.model), start)
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trainable and all(".default." in name for name in trainable)
    trainer.train()
    assert not same(weights(trainer.model), start)
    assert same(weights(trainer.model, "ref"), start)
    assert same(weights(trainer.model, None), frozen)
    first, second = (step["actor/kl_loss"] for step in recorder.steps)
    assert first == 0.0 and second > 1e-4


@pytest.mark.parametrize(
    "config",
    [
        lora(target_modules=["embed_tokens", "v_proj"]),
        lora(target_modules=["v_proj"], use_dora=True, modules_to_save=["lm_head"]),
        IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False),
    ],
    ids=["embedding", "dora", "ia3"],
)
def test_the_reference_copies_every_kind_of_parameter(tmp_path, config):
    """Some kinds keep their weights in a dict of parameters, where names end with the adapter's."""
    torch.manual_seed(3)
    model = get_peft_model(tiny.model(), config)
    with torch.no_grad():  # what any kind begins with, it may be the identity
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    trainer, recorder = make(tmp_path, model, use_kl_loss=True)
    trainer.train()
    first, second = (step["actor/kl_loss"] for step in recorder.steps)
    assert first == 0.0 and second > 1e-4


def test_path_and_object_train_alike(tmp_path, saved):
    base, adapter = saved
    ends = []
    for model in (adapter, load(base, adapter, is_trainable=True)):
        trainer, _ = make(tmp_path, model)
        trainer.train()
        ends.append(weights(trainer.model))
    assert same(*ends)


def test_model_init_kwargs_are_the_base_models(tmp_path, saved):
    _, adapter = saved
    trainer, _ = make(
        tmp_path, adapter, model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "eager", "revision": "main"}
    )
    assert {p.dtype for p in weights(trainer.model, None).values()} == {torch.bfloat16}
    assert {p.dtype for p in weights(trainer.model).values()} == {torch.float32}  # what is trained
    assert trainer.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("asked", "used"), [(None, "of-the-adapter"), ("asked-for", "asked-for")])
def test_the_base_models_revision(saved, tmp_path, monkeypatch, asked, used):
    base, adapter = saved
    settings = json.loads((Path(adapter) / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "revision": "of-the-adapter"}))
    seen = {}

    def record(model_id, **kwargs):
        seen.update(kwargs, model_id=model_id)
        raise OSError("enough")

    monkeypatch.setattr(adapters, "create_model_from_path", record)
    with pytest.raises(ValueError, match="enough"):
        adapters.load_adapter(str(tmp_path), is_trainable=True, **({"revision": asked} if asked else {}))
    assert (seen["model_id"], seen["revision"]) == (base, used)


@pytest.mark.parametrize("disable_dropout", [True, False])
def test_dropout_decides_whether_the_ratio_is_1_before_an_update(tmp_path, saved, caplog, disable_dropout):
    """Two passes over the rows of one generation: before the first one, old and new policy are the same."""
    _, adapter = saved
    trainer, recorder = make(tmp_path, adapter, num_iterations=2, disable_dropout=disable_dropout)
    warned = [r.getMessage() for r in caplog.records if "the ratio is no longer 1" in r.getMessage()]
    trainer.train()
    before, after = recorder.steps
    if disable_dropout:
        assert before["actor/ppo_kl"] == before["actor/pg_clipfrac"] == 0.0
        assert not warned
    else:
        assert abs(before["actor/ppo_kl"]) > 1e-4 and before["actor/pg_clipfrac"] > 0
        assert len(warned) == 1 and "lora_dropout" in warned[0]
    assert abs(after["actor/ppo_kl"]) > 1e-4


# Refused


def test_a_new_adapter_on_a_saved_one_is_refused(tmp_path, saved):
    base, adapter = saved
    with pytest.raises(ValueError, match="saved adapter '.*adapter' and peft_config=LoraConfig"):
        make(tmp_path, adapter, lora())
    with pytest.raises(ValueError, match="a PeftModel and peft_config=LoraConfig"):
        make(tmp_path, load(base, adapter, is_trainable=True), lora())


def test_a_frozen_adapter_is_refused(tmp_path, saved):
    with pytest.raises(ValueError, match="no trainable parameter.*is_trainable=True"):
        make(tmp_path, load(*saved))


def test_a_trainable_adapter_that_is_not_active_does_not_count(tmp_path, saved):
    model = load(*saved)
    model.load_adapter(saved[1], "other", is_trainable=True)
    assert model.active_adapters == ["default"]
    with pytest.raises(ValueError, match="no trainable parameter.*is_trainable=True"):
        make(tmp_path, model)


def test_an_adapter_of_another_name_is_refused(tmp_path, saved):
    model = load(*saved, is_trainable=True, adapter_name="mine")
    with pytest.raises(ValueError, match=r"active adapter is \['mine'\].*'default'.*is_trainable=True"):
        make(tmp_path, model)


def test_a_second_trainer_of_the_same_model_names_the_reference_in_the_way(tmp_path, saved):
    model = load(*saved, is_trainable=True)
    make(tmp_path, model, use_kl_loss=True)
    with pytest.raises(ValueError, match=r"adapter named 'ref'.*delete_adapter\('ref'\)"):
        make(tmp_path, model, use_kl_loss=True)
    model.delete_adapter("ref")
    trainer, recorder = make(tmp_path, model, use_kl_loss=True, max_steps=1)
    trainer.train()
    assert recorder.steps[0]["actor/kl_loss"] == 0.0


def test_an_adapter_that_transformers_loaded_is_refused(tmp_path, saved):
    with pytest.raises(ValueError, match="pass the adapter's path as the model.*is_trainable=True"):
        make(tmp_path, AutoModelForCausalLM.from_pretrained(saved[1]))


def copied(adapter, folder, **changes) -> str:
    """The adapter in another folder, with another config."""
    (folder / "adapter").mkdir()
    for path in Path(adapter).iterdir():
        (folder / "adapter" / path.name).write_bytes(path.read_bytes())
    config = folder / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    return str(folder / "adapter")


def test_an_adapter_without_its_base_model(tmp_path, saved):
    adapter = copied(saved[1], tmp_path, base_model_name_or_path=None)
    with pytest.raises(ValueError, match=f"{adapter} names no base model"):
        make(tmp_path, adapter)


def test_an_adapter_whose_base_model_has_moved(tmp_path, saved):
    adapter = copied(saved[1], tmp_path, base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="base model '.*gone' of the adapter .* cannot be loaded.*adapter_config.json"):
        make(tmp_path, adapter)


@pytest.mark.parametrize("other", [{"hidden_size": 32}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}])
def test_an_adapter_of_another_base_model(tmp_path, other):
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    tiny.model(**other).save_pretrained(base)
    get_peft_model(tiny.model(), lora(target_modules=["q_proj"])).save_pretrained(adapter)
    with pytest.raises(ValueError, match="(?s)cannot be put on '.*base'.*use the base model that it was trained on"):
        adapters.load_adapter(adapter, is_trainable=True, base=base)


# Saving


@pytest.mark.parametrize("kl", [False, True])
def test_a_trained_adapter_reloads_to_the_same_outputs(tmp_path, saved, kl):
    base, adapter = saved
    trainer, _ = make(tmp_path, adapter, use_kl_loss=kl)
    trainer.train()
    folder = tmp_path / "final"
    trainer.save_model(str(folder))
    assert all(tensor.numel() for tensor in load_file(folder / "adapter_model.safetensors").values())
    assert (folder / "tokenizer_config.json").exists()
    reloaded = load(base, str(folder))
    assert list(reloaded.peft_config) == ["default"]  # the one trained, not the reference
    assert torch.equal(logits(reloaded), logits(trainer.model))
    assert (logits(reloaded) - logits(load(base, adapter))).abs().max() > 0.01
    assert (folder / "ref").exists() == kl
    if kl:
        assert torch.equal(logits(load(base, str(folder / "ref"))), logits(load(base, adapter)))
    further, _ = make(tmp_path, str(folder), use_kl_loss=True)
    assert same(weights(further.model), weights(trainer.model))


def train_under_zero3(base: str, adapter: str, out: str) -> None:
    """What each rank of `test_zero3_saves_whole_adapters` runs: a new adapter, a saved one, a saved one with KL."""
    from accelerate.state import AcceleratorState
    from grid_worker import allow_sharding_on_cpu, deepspeed_config
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    allow_sharding_on_cpu()
    runs = {"new": (base, lora(), False), "path": (adapter, None, False), "kl": (adapter, None, True)}
    for name, (model, peft_config, kl) in runs.items():
        trainer, recorder = make(
            Path(out) / "run",
            model,
            peft_config,
            use_kl_loss=kl,
            per_device_train_batch_size=4,
            optim="sgd",
            deepspeed=deepspeed_config(3),
            use_cpu=False,
        )
        trainer.train()
        assert all(hasattr(p, "ds_id") for p in trainer.model.parameters())
        if kl:
            assert recorder.steps[0]["actor/kl_loss"] == 0.0 < recorder.steps[1]["actor/kl_loss"]
        trainer.save_model(f"{out}/{name}")
        outputs = logits(trainer.model)
        if trainer.accelerator.is_main_process:
            torch.save(outputs, f"{out}/{name}.pt")
        trainer.accelerator.free_memory()
        torch.distributed.barrier()
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
    torch.distributed.destroy_process_group()


def test_zero3_saves_whole_adapters(tmp_path, saved):
    base, adapter = saved
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [__file__, base, adapter, str(tmp_path)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    for name in ("new", "path", "kl"):
        tensors = load_file(tmp_path / name / "adapter_model.safetensors")
        assert len(tensors) == 28 and all(tensor.numel() for tensor in tensors.values())
        reloaded = load(base, str(tmp_path / name))
        torch.testing.assert_close(logits(reloaded), torch.load(tmp_path / f"{name}.pt"), rtol=1e-4, atol=1e-4)
        assert (logits(reloaded) - logits(load(base, adapter))).abs().max() > 0.01


# Merging


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example model with its tokenizer, and an adapter of it."""
    folder = tmp_path_factory.mktemp("example")
    base = str(tiny.EXAMPLES / "tiny_qwen2")
    torch.manual_seed(3)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora(lora_dropout=0.3, bias="all"))
    model.save_pretrained(folder / "adapter")
    return base, str(folder / "adapter")


def test_merging_gives_a_plain_model_folder(tmp_path, example, capsys):
    base, adapter = example
    output = tmp_path / "made" / "merged"
    merge.main([adapter, str(output)])
    said = capsys.readouterr().out
    assert "float32 model whose logits are the adapter's within" in said and "tolerance 0.0001" in said
    assert not (output / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(output)
    torch.testing.assert_close(logits(merged), logits(load(base, adapter)), rtol=1e-4, atol=1e-4)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (output / name).exists()
    assert GenerationConfig.from_pretrained(output).eos_token_id == GenerationConfig.from_pretrained(base).eos_token_id
    assert [path.name for path in output.parent.iterdir()] == ["merged"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_merging_into_another_dtype_and_from_another_folder(tmp_path, example, dtype):
    base, adapter = example
    adapter = copied(adapter, tmp_path, base_model_name_or_path="moved/away")
    done = merge.merge(adapter, str(tmp_path / "merged"), base=base, dtype=dtype)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == getattr(torch, dtype)
    assert done.gap < done.effect / 5


def test_merging_keeps_the_adapters_tokenizer(tmp_path, saved):
    """Training may have set its padding token; the base model's folder has none here."""
    adapter = copied(saved[1], tmp_path)
    tiny.tokenizer().save_pretrained(adapter)
    merge.merge(adapter, str(tmp_path / "merged"))
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == (Path(adapter) / "tokenizer.json").read_text()


def test_an_adapter_smaller_than_the_rounding_is_told(tmp_path, saved, capsys):
    model = load(*saved)
    with torch.no_grad():
        for parameter in weights_of(model, "lora_B"):
            parameter.mul_(1e-5)
    model.save_pretrained(tmp_path / "adapter")
    merge.main([str(tmp_path / "adapter"), str(tmp_path / "merged"), "--dtype", "bfloat16"])
    said = capsys.readouterr().err
    assert "use --dtype float32" in said and "has a tokenizer" in said


def weights_of(model, part):
    return [parameter for name, parameter in model.named_parameters() if part in name]


def test_a_merge_that_the_folder_cannot_hold_is_not_kept(tmp_path, saved):
    """Tied embeddings: an adapter on the output layer alone cannot be written into the one matrix of both."""
    base = tmp_path / "base"
    tiny.model(tie_word_embeddings=True).save_pretrained(base)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora(target_modules=["lm_head"]))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(ValueError, match="logits differ from the adapter's.*nothing was written.*tied embeddings"):
        merge.merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_what_cannot_be_merged(tmp_path, saved, capsys):
    base, adapter = saved
    with pytest.raises(SystemExit, match=f"error: {base} has no adapter_config.json"):
        merge.main([base, str(tmp_path / "merged")])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="error: .*full exists and is not an empty folder"):
        merge.main([adapter, str(tmp_path / "full")])
    with pytest.raises(SystemExit, match="error: the base model '.*gone' of the adapter .* cannot be loaded"):
        merge.main([adapter, str(tmp_path / "merged"), "--base", str(tmp_path / "gone")])
    with pytest.raises(SystemExit):
        merge.main([adapter, str(tmp_path / "merged"), "--dtype", "int8"])
    assert "invalid choice: 'int8'" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "merged").exists()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_under_zero3(*sys.argv[1:])
