"""Mistakes in settings and data: one error names the setting, its value and the remedy, before a model is loaded."""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import itertools
import re
import textwrap

import pytest
import tiny
from datasets import Dataset, IterableDataset
from trl import GRPOConfig, GRPOTrainer, TrlParser

import grpo_ext.training
from grpo_ext import KL_PENALTIES, LOSS_AGG_MODES, POLICY_LOSSES, GRPOVerlConfig, GRPOVerlTrainer
from grpo_ext.training import _versions


def config(folder="out", **settings) -> GRPOVerlConfig:
    return GRPOVerlConfig(
        str(folder), **{"per_device_train_batch_size": 8, "num_generations": 4, "use_cpu": True, **settings}
    )


def trainer(folder, dataset, **others):
    """Of a model that does not exist, so that an error about the data was found without it."""
    args = others.pop("args", None) or config(folder)
    return GRPOVerlTrainer("no/such-model", tiny.length_reward, args, dataset, **others)


def refused(error=ValueError, **settings) -> str:
    with pytest.raises(error) as caught:
        config(**settings)
    return str(caught.value)


# TRL's names of the objective's quantities

REFUSED = [  # setting, value, what the error says must be done
    ("epsilon", 0.1, "set clip_ratio_low=0.1 (now 0.2)"),
    ("epsilon_high", 0.28, "set clip_ratio_high=0.28 (now 0.2)"),
    ("delta", 4.0, "set clip_ratio_c=4.0 (now 3.0)"),
    ("beta", 0.04, "set use_kl_loss=True and kl_loss_coef=0.04 (in force now: 0.0)"),
    ("loss_type", "grpo", "set loss_agg_mode='seq-mean-token-mean' instead"),
    ("loss_type", "bnpo", "set loss_agg_mode='token-mean' instead"),
    ("loss_type", "dr_grpo", "set loss_agg_mode='seq-mean-token-sum-norm' and norm_adv_by_std_in_grpo=False"),
    ("loss_type", "cispo", "choose policy_loss among vanilla"),
    ("scale_rewards", False, "set norm_adv_by_std_in_grpo=False"),
    ("scale_rewards", "none", "set norm_adv_by_std_in_grpo=False"),
    ("scale_rewards", "batch", "advantages are normalised per group"),
    ("multi_objective_aggregation", "normalize_then_sum", "leave 'sum_then_normalize'"),
    ("entropy_coef", 0.01, "set entropy_coeff=0.01"),
    ("use_adaptive_entropy", True, "entropy_coeff"),
    ("entropy_coef_min", 0.001, "entropy_coeff"),
    ("entropy_coef_max", 0.5, "entropy_coeff"),
    ("entropy_coef_delta", 0.5, "entropy_coeff"),
    ("entropy_target", 0.5, "entropy_coeff"),
    ("top_entropy_quantile", 0.2, "leave 1.0"),
    ("off_policy_mask_threshold", 0.5, "leave None"),
    ("importance_sampling_level", "sequence", "register_policy_loss"),
    ("use_bias_correction_kl", True, "kl_loss_type='low_var_kl+' or 'k2'"),
    *((f"sapo_temperature_{sign}", 2.0, "loss_type='sapo'") for sign in ("neg", "pos")),
    *((f"vespo_{name}", 5.0, "loss_type='vespo'") for name in ("k_pos", "k_neg", "lambda_pos", "lambda_neg")),
]

# What TRL's loss reads and this trainer obeys as well
CARRIED = {
    "max_completion_length",
    "router_aux_loss_coef",
    "steps_per_generation",
    "use_vllm",
    "vllm_importance_sampling_correction",
}
# ... and what its scoring of a generation batch reads
CARRIED_IN_SCORING = {
    "chat_template_kwargs",
    "generation_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing_kwargs",
    "log_multimodal",
    "mask_truncated_completions",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "pad_to_multiple_of",
    "per_device_eval_batch_size",
    "per_device_train_batch_size",
    "reward_weights",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_mode",
}


@pytest.mark.parametrize(("name", "value", "remedy"), REFUSED, ids=[f"{name}-{value}" for name, value, _ in REFUSED])
def test_trls_name_of_a_quantity_is_refused_with_the_remedy(name, value, remedy):
    message = refused(**{name: value})
    assert message.startswith(f"{name}={value!r} ") and remedy in message and "\n" not in message


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.1, "clip_ratio_low": 0.1},
        {"epsilon": 0.3, "clip_ratio": 0.3},
        {"epsilon_high": 0.28, "clip_ratio_high": 0.28},
        {"delta": 3.0},
        {"delta": 4.0, "clip_ratio_c": 4.0},
        {"beta": 0.04, "use_kl_loss": True, "kl_loss_coef": 0.04},
        {"beta": 0.0, "use_kl_loss": True},
        {"loss_type": "dapo"},
        {"scale_rewards": "group"},
        {"scale_rewards": True},
        {"scale_rewards": "none", "norm_adv_by_std_in_grpo": False},
        {"scale_rewards": False, "norm_adv_by_std_in_grpo": False},
        {"entropy_coef": 0.01, "entropy_coeff": 0.01},
        {"importance_sampling_level": "token"},
        {"use_bias_correction_kl": False},
        {"use_liger_kernel": True},
    ],
    ids=str,
)
def test_what_agrees_with_the_objective_passes(settings):
    config(**settings)


@pytest.mark.parametrize("name", ["epsilon", "beta", "entropy_coef"])
def test_what_agreed_once_is_refused_when_the_objectives_value_changes(name):
    agreeing = {"epsilon": {"clip_ratio": 0.3}, "beta": {"use_kl_loss": True, "kl_loss_coef": 0.3}}
    settings = agreeing.get(name, {"entropy_coeff": 0.3})
    config(**{name: 0.3}, **settings)
    assert refused(**{name: 0.25}, **settings).startswith(f"{name}=0.25 ")


def settings_read_by(method) -> set[str]:
    """Fields of `trl.GRPOConfig` that a method of TRL's trainer reads, also through attributes set in `__init__`."""
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}

    def attributes(node: ast.AST) -> set[tuple[str, str]]:
        """`("args", x)` for `args.x` and `self.args.x`, `("self", x)` for other `self.x`."""
        found = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute):
                owner, _, name = ast.unparse(part).rpartition(".")
                if owner in ("args", "self.args", "self"):
                    found.add((owner.removeprefix("self."), name))
        return found

    def tree(function) -> ast.AST:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))

    made_of: dict[str, set] = {}
    for node in ast.walk(tree(GRPOTrainer.__init__)):
        if isinstance(node, ast.Assign):
            for target in map(ast.unparse, node.targets):
                if target.startswith("self."):
                    made_of.setdefault(target.removeprefix("self."), set()).update(attributes(node.value))
    seen: set = set()
    waiting = list(attributes(tree(method)))
    while waiting:
        attribute = waiting.pop()
        if attribute not in seen:
            seen.add(attribute)
            waiting += made_of.get(attribute[1], ()) if attribute[0] == "self" else ()
    return {name for _, name in seen} & fields


def test_no_setting_that_trls_loss_reads_slips_through():
    """A setting that TRL adds to its loss fails here until it is carried or refused."""
    refused_names = {name for name, _, _ in REFUSED}
    read = settings_read_by(GRPOTrainer._compute_loss)
    assert {"epsilon", "beta", "loss_type", "entropy_target", "vespo_k_pos"} <= read  # the search does find them
    assert read == (refused_names - {"scale_rewards", "multi_objective_aggregation"}) | CARRIED
    scoring = settings_read_by(GRPOTrainer._generate_and_score_completions)
    assert {"scale_rewards", "multi_objective_aggregation"} <= scoring
    assert scoring <= refused_names | CARRIED | CARRIED_IN_SCORING
    assert not refused_names & (CARRIED | CARRIED_IN_SCORING)


# The objective's own settings


@pytest.mark.parametrize("value", [1, 1.0, 0.5, -3, float("inf"), float("nan"), "3", None, True])
def test_clip_ratio_c_must_exceed_1(value):
    message = refused(clip_ratio_c=value)
    assert message.startswith(f"clip_ratio_c={value!r} must be greater than 1")


@pytest.mark.parametrize("name", ["clip_ratio", "clip_ratio_low", "clip_ratio_high"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), "a lot"])
def test_clips_are_not_negative(name, value):
    assert refused(**{name: value}) == f"{name}={value!r} must be a finite number >= 0, such as 0.2"


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("policy_loss", POLICY_LOSSES),
        ("loss_agg_mode", LOSS_AGG_MODES),
        ("kl_loss_type", KL_PENALTIES),
        ("forward_layout", ("auto", "packed", "grouped", "padded")),
    ],
)
def test_an_unknown_name_lists_the_valid_ones(name, valid):
    assert refused(**{name: "banana"}) == f"{name}='banana' is unknown; choose one of {', '.join(valid)}"


@pytest.mark.parametrize("value", [0, -5, "many"])
def test_loss_scale_factor_is_a_number_of_tokens(value):
    message = refused(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=value)
    assert message == f"loss_scale_factor={value!r} must be a number of tokens > 0, or None"


def test_settings_without_effect():
    assert "has no effect with loss_agg_mode='token-mean'; set loss_agg_mode='seq-mean-token-sum-norm'" in refused(
        loss_scale_factor=1024
    )
    assert refused(kl_loss_coef=0.1).startswith(
        "kl_loss_coef=0.1 has no effect with use_kl_loss=False; set use_kl_loss=True"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kl_loss_coef", -0.1),
        ("entropy_coeff", float("nan")),
        ("max_nonfinite_steps", 0),
        ("max_tokens_per_forward", 0),
        ("num_generations", 1),
        ("num_generations", None),
    ],
)
def test_values_out_of_range(name, value):
    settings = {"use_kl_loss": True} if name == "kl_loss_coef" else {}
    assert refused(**{name: value}, **settings).startswith(f"{name}={value!r} must be")


# Batches


SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
BATCHES = [
    {},
    *({"steps_per_generation": n} for n in (2, 3, 5)),
    *({"generation_batch_size": n} for n in (10, 36, 50)),
]
GEOMETRIES = [
    {**dict(zip(SIZES, sizes, strict=True)), **batch}
    for *sizes, batch in itertools.product((1, 4, 6), (1, 2, 3), (4, 6, 8), BATCHES)
]


def error_of(settings) -> str:
    """The message, or nothing."""
    try:
        config(**settings, use_cpu=False)  # on CPUs accelerate would look for the other ranks
    except ValueError as error:
        return str(error)
    return ""


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_that_do_not_divide_name_numbers_that_do(monkeypatch, ranks):
    """Every number that an error proposes is tried: a batch must pass, another setting must mend this error."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(GRPOConfig, "world_size", ranks)
    kinds = {"generation_batch_size=": 0, "the generation batch of": 0, "steps_per_generation=": 0}
    for settings in GEOMETRIES:
        message = error_of(settings)
        if not message:
            continue
        (kind,) = (kind for kind in kinds if message.startswith(kind))
        kinds[kind] += 1
        advice = message[message.rindex("; use ") :]
        batches, others = [], []
        if kind == "generation_batch_size=":
            batches = [{"generation_batch_size": n} for n in numbers(advice)]
        elif kind == "the generation batch of":
            among, batch = advice.split(", or a batch of ")
            others = [{"num_generations": n} for n in numbers(among)]
            rows, steps = numbers(batch)
            batches = [{"generation_batch_size": rows}, {"steps_per_generation": steps}]
        else:
            steps, *accumulations = numbers(advice)
            batches = [{"steps_per_generation": steps}]
            others = [{"gradient_accumulation_steps": n} for n in accumulations]
        assert batches
        without = {name: value for name, value in settings.items() if name in SIZES}
        for batch in batches:
            assert error_of({**without, **batch}) == "", (message, batch)
        for other in others:
            assert not error_of({**settings, **other}).startswith(kind), (message, other)
    assert min(kinds.values()) > 3, kinds


@pytest.mark.parametrize(("steps", "accumulation"), [(1, 2), (2, 4), (3, 2), (5, 2)])
def test_optimizer_steps_do_not_span_generations(steps, accumulation):
    message = refused(steps_per_generation=steps, gradient_accumulation_steps=accumulation)
    assert message.startswith(
        f"steps_per_generation={steps} must be a multiple of gradient_accumulation_steps={accumulation}"
    )


def test_fewer_prompts_than_a_generation_batch(tmp_path):
    args = config(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=8)
    with pytest.raises(ValueError, match="has 15 prompts and a generation batch takes 16.*64 / num_generations 4"):
        trainer(tmp_path, tiny.prompts(15), args=args)


def test_dropped_prompts_are_counted(tmp_path, caplog):
    args = config(tmp_path, per_device_train_batch_size=12)
    with pytest.raises(OSError):  # a warning only: the model is looked for
        trainer(tmp_path, tiny.prompts(8), args=args)
    assert "2 of 8 prompts are left out in each epoch: a generation batch takes 3" in caplog.text


# Data, folders, arguments


def rows(*columns):
    def generate():
        yield dict.fromkeys(columns, "w1")

    return generate


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.from_dict({"question": ["w1"] * 8, "answer": ["w2"] * 8}),
        Dataset.from_dict({"question": ["w1"] * 8, "answer": ["w2"] * 8}).to_iterable_dataset(),
        IterableDataset.from_generator(rows("question", "answer")),
    ],
    ids=["map", "iterable", "generator"],
)
def test_a_dataset_without_prompts(tmp_path, dataset):
    said = r"train_dataset has no 'prompt' column \(it has \['answer', 'question'\]\).*rename_column\('answer'"
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, dataset)
    with pytest.raises(ValueError, match=said.replace("train_dataset", "eval_dataset")):
        trainer(tmp_path, tiny.prompts(), eval_dataset=dataset)
    with pytest.raises(ValueError, match=said.replace("train_dataset", "eval_dataset hard")):
        trainer(tmp_path, tiny.prompts(), eval_dataset={"easy": tiny.prompts(), "hard": dataset})


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Dataset.from_dict({"prompt": []}), "train_dataset has 0 prompts and a generation batch takes 2"),
        (Dataset.from_dict({}), "train_dataset has no columns; give it a 'prompt' column"),
        (IterableDataset.from_generator(lambda: iter(())), "train_dataset is empty; give it at least one row"),
    ],
    ids=["no rows", "no columns", "generator"],
)
def test_an_empty_dataset(tmp_path, dataset, said):
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, dataset)


def test_trls_config_is_refused(tmp_path):
    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=8, use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="args is a GRPOConfig; GRPOVerlTrainer takes a GRPOVerlConfig"):
        trainer(tmp_path, tiny.prompts(), args=args)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    folder = str(tmp_path / "file" / "run")
    with pytest.raises(ValueError, match=f"output_dir='{folder}' cannot be written to .*choose a writable folder"):
        trainer(folder, tiny.prompts())


# The command line


def parsed(tmp_path, yaml: str = "", *flags: str) -> GRPOVerlConfig:
    (tmp_path / "config.yaml").write_text(f"output_dir: {tmp_path}\nnum_generations: 4\nuse_cpu: true\n{yaml}\n")
    (args,) = TrlParser(GRPOVerlConfig).parse_args_and_config(["--config", str(tmp_path / "config.yaml"), *flags])
    return args


def test_yaml_and_flags_give_numbers(tmp_path):
    """YAML reads `1e-3` as a string, and flags are strings."""
    args = parsed(
        tmp_path,
        "clip_ratio_high: 0.28\nuse_kl_loss: true\nkl_loss_coef: 1e-3\nloss_scale_factor: 1024\n"
        "loss_agg_mode: seq-mean-token-sum-norm\nepsilon_high: 0.28\nscale_rewards: none\nclip_ratio_c: 1e1\n"
        "norm_adv_by_std_in_grpo: false\nmax_tokens_per_forward: 4096",
        *("--entropy_coeff", "1e-2", "--clip_ratio_low", "0.1", "--calculate_entropy", "false"),
    )
    objective = args.objective_config()
    assert (objective.clip_high, objective.clip_low, objective.clip_ratio_c) == (0.28, 0.1, 10.0)
    assert (objective.kl_loss_coef, objective.use_kl_loss, objective.entropy_coeff) == (0.001, True, 0.01)
    assert objective.loss_scale_factor == 1024
    assert (args.norm_adv_by_std_in_grpo, args.max_tokens_per_forward, args.calculate_entropy) == (False, 4096, False)


def test_the_command_line_is_refused_alike(tmp_path):
    with pytest.raises(ValueError, match=r"epsilon_high=0.3 .* set clip_ratio_high=0.3 \(now 0.28\)"):
        parsed(tmp_path, "clip_ratio_high: 0.28", "--epsilon_high", "0.3")
    with pytest.raises(ValueError, match="scale_rewards='False' .*norm_adv_by_std_in_grpo=False"):
        parsed(tmp_path, "", "--scale_rewards", "False")
    with pytest.raises(ValueError, match="kl_loss_coef=0.1 has no effect"):
        parsed(tmp_path, "kl_loss_coef: 1e-1")


# Versions


def test_another_trl_is_refused_in_one_line_at_import(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.17.0")
    try:
        importlib.reload(_versions)
        with pytest.raises(ImportError) as caught:
            importlib.reload(grpo_ext.training)
    finally:
        monkeypatch.undo()
        importlib.reload(_versions)
    assert str(caught.value) == (
        "grpo_ext is tested with TRL 1.16 and found TRL 1.17.0; install it with: pip install 'trl>=1.16,<1.17'"
    )


def test_a_missing_trl_is_told_in_one_line(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(_versions, "version", missing)
    with pytest.raises(ImportError, match="^grpo_ext needs TRL 1.16 and none is installed; install it with: pip"):
        _versions.require_tested_trl()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_cov_lb": None}, "clip_cov_lb=None"),
        ({"kl_cov_ratio": None}, "kl_cov_ratio=None"),
        ({"reward_weights": 1.0}, "reward_weights=1.0"),
        ({"teacher_model": 7}, "teacher_model=7"),
        ({"teacher_model": ""}, "teacher_model=''"),
        ({"overlong_buffer_len": 4, "max_completion_length": None}, "overlong_buffer_len=4"),
        ({"teacher_model": "t", "distillation_loss_mode": "k1", "use_task_rewards": False, "use_kl_in_reward": True},
         "use_kl_in_reward=True"),
        ({"teacher_model": "t", "distillation_loss_mode": "k1", "use_task_rewards": False, "adv_estimator": "rloo"},
         "adv_estimator='rloo'"),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_named(tmp_path, settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        GRPOVerlConfig(str(tmp_path), use_cpu=True, report_to=[], **settings)
