"""Preflight: the batch plan in TRL's names and verl's, parameters, memory, and what would spoil a run."""

import copy
import math
import random
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch import nn
from trl.data_utils import is_conversational, prepare_multimodal_messages
from trl.trainer.utils import is_async_callable

from .config import GRPOVerlConfig

if TYPE_CHECKING:
    from .trainer import GRPOVerlTrainer

# Bounds of what is looked at, so that the preflight takes about a second on any dataset
MAX_PROMPTS = 1000
MAX_GOLDS = 100
PROMPTS_AT_A_TIME = 64

GOLD_COLUMNS = ("answer", "solution", "ground_truth")
# A reward function reads one of these forms, and which one is not known
FORMS = (
    "{0}",
    "#### {0}",
    "\\boxed{{{0}}}",
    "<answer>{0}</answer>",
    "<think>\nSo it is.\n</think>\n<answer>\n{0}\n</answer>",
    "<think>\nSo it is.\n</think>\nThe answer is \\boxed{{{0}}}.",
)
GIB = 2**30


class Line(NamedTuple):
    """One quantity of the plan, and where TRL and verl set it (empty: nowhere)."""

    quantity: str
    number: float
    trl: str
    verl: str


@dataclass(frozen=True)
class BatchPlan:
    """How many prompts, responses, micro-batches and optimizer steps a run takes; a *step* is an optimizer step.

    Attributes:
        ranks: processes that train.
        num_generations: responses to a prompt.
        micro_batch: responses of a rank in one micro-batch.
        accumulation: micro-batches of a rank in a step.
        steps_per_generation: micro-batches of a rank in a generation.
        num_iterations: passes over a generation.
        max_steps: steps of the run; not positive: `epochs` decides.
        epochs: passes over the dataset.
        dataset_prompts: rows of the dataset; `None`: unknown, as of a stream.
    """

    ranks: int
    num_generations: int
    micro_batch: int
    accumulation: int
    steps_per_generation: int
    num_iterations: int = 1
    max_steps: int = -1
    epochs: float = 1.0
    dataset_prompts: int | None = None

    @classmethod
    def of(cls, args: GRPOVerlConfig, ranks: int, dataset_prompts: int | None = None) -> "BatchPlan":
        """The plan of these settings on so many processes."""
        return cls(
            ranks=ranks,
            num_generations=args.num_generations,
            micro_batch=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            steps_per_generation=args.steps_per_generation,
            num_iterations=args.num_iterations,
            max_steps=args.max_steps,
            epochs=args.num_train_epochs,
            dataset_prompts=dataset_prompts,
        )

    @property
    def responses(self) -> int:
        """Of a generation, all ranks'."""
        return self.micro_batch * self.steps_per_generation * self.ranks

    @property
    def prompts(self) -> int:
        """Of a generation, all ranks'."""
        return self.responses // self.num_generations

    @property
    def responses_per_step(self) -> int:
        """All ranks'."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def prompts_per_step(self) -> float:
        """All ranks'; a fraction where a step splits a group."""
        return self.responses_per_step / self.num_generations

    @property
    def steps_of_generation(self) -> int:
        """Optimizer steps from one generation to the next."""
        return self.steps_per_generation // self.accumulation * self.num_iterations

    @property
    def generations_per_epoch(self) -> int | None:
        """`None`: unknown."""
        return None if self.dataset_prompts is None else self.dataset_prompts // self.prompts

    @property
    def dropped(self) -> int | None:
        """Prompts that an epoch leaves out, since they fill no generation; `None`: unknown."""
        return None if self.dataset_prompts is None else self.dataset_prompts % self.prompts

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run; `None`: unknown."""
        if self.max_steps > 0:
            return self.max_steps
        if self.generations_per_epoch is None:
            return None
        return math.ceil(self.epochs * self.generations_per_epoch * self.steps_of_generation)

    @property
    def total_generations(self) -> int | None:
        """Generations of the run; `None`: unknown."""
        return None if self.total_steps is None else -(-self.total_steps // self.steps_of_generation)

    def lines(self) -> list[Line]:
        """The table, without what is unknown."""
        lines = [
            Line(
                "prompts a generation", self.prompts, "generation_batch_size / num_generations", "data.train_batch_size"
            ),
            Line("responses to a prompt", self.num_generations, "num_generations", "rollout.n"),
            Line("responses a generation", self.responses, "generation_batch_size", "train_batch_size x n"),
            Line("micro-batches a generation, rank", self.steps_per_generation, "steps_per_generation", ""),
            Line(
                "responses in a micro-batch, rank",
                self.micro_batch,
                "per_device_train_batch_size",
                "actor.ppo_micro_batch_size_per_gpu",
            ),
            Line("micro-batches in a step, rank", self.accumulation, "gradient_accumulation_steps", ""),
            Line("prompts in an optimizer step", self.prompts_per_step, "", "actor.ppo_mini_batch_size"),
            Line("passes over a generation", self.num_iterations, "num_iterations", "actor.ppo_epochs"),
            Line(
                "optimizer steps a generation",
                self.steps_of_generation,
                "steps_per_generation / accumulation x passes",
                "train_batch_size / mini_batch_size x epochs",
            ),
            Line("generations an epoch", self.generations_per_epoch, "", ""),
            Line("prompts dropped an epoch", self.dropped, "", ""),
            Line("optimizer steps in all", self.total_steps, "max_steps", ""),
            Line("generations in all", self.total_generations, "", "trainer.total_training_steps"),
        ]
        return [line for line in lines if line.number is not None]

    def __str__(self) -> str:
        """The table as text, one quantity a line; *rank* says that it is of one rank."""
        cells = [(f"batch plan on {self.ranks} rank(s)", "", "TRL", "verl")]
        for name, number, *keys in self.lines():
            cells.append((name, f"{number:,}" if isinstance(number, int) else f"{number:.4g}", *keys))
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        return "\n".join(
            f"{name:{widths[0]}}  {number:>{widths[1]}}  {trl:{widths[2]}}  {verl}".rstrip()
            for name, number, trl, verl in cells
        )


# Parameters and memory


class Memory(NamedTuple):
    """Bytes that one rank holds during the whole run, activations, logits and sampling left out."""

    weights: int
    gradients: int
    optimizer: int | None  # `None`: the state of this optimizer is not known
    reference: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + (self.optimizer or 0) + self.reference


def elements(parameter: nn.Parameter) -> int:
    """Of the whole parameter, also where this rank holds a shard of it (ZeRO-3), or two to a byte (4-bit)."""
    if type(parameter).__name__ == "Params4bit":
        return 2 * parameter.numel() * parameter.element_size()
    return getattr(parameter, "ds_numel", parameter.numel())


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Trainable parameters, and all."""
    counts = [(elements(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in counts if trained), sum(n for n, _ in counts)


def reference_kind(trainer: "GRPOVerlTrainer") -> str:
    """What the KL term is taken to, in words."""
    if not trainer.args.needs_reference:
        return "none"
    if trainer.ref_model is not None:
        return f"a frozen copy of {count_parameters(trainer.ref_model)[1]:,} parameters"
    if isinstance(trainer.model, PeftModel) and "ref" in trainer.model.peft_config:
        return "a frozen copy of the adapter"
    return "the model with its adapter off"


def estimate_memory(trainer: "GRPOVerlTrainer") -> Memory:
    """Weights, gradients and AdamW's state of one rank, and the reference's weights.

    With `N` parameters of `b` bytes, `n` of them trained: weights `N b`, gradients `n b`, AdamW `2 n b`. DeepSpeed in
    half precision casts to `b = 2` and keeps a master copy and both moments in float32, `12 n`; its ZeRO-1 and ZeRO-2
    keep that copy in float32 too. ZeRO-1 divides the optimizer's state by the ranks, ZeRO-2 the gradients too, ZeRO-3
    and FSDP everything. What DeepSpeed offloads is counted, though the host holds it.
    """
    accelerator = trainer.accelerator
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    half = deepspeed and accelerator.mixed_precision in ("bf16", "fp16")
    stage = 3 if accelerator.distributed_type == DistributedType.FSDP else 0
    if deepspeed:
        stage = accelerator.state.deepspeed_plugin.zero_stage
    shares = {least: accelerator.num_processes if stage >= least else 1 for least in (1, 2, 3)}

    def size(model: nn.Module, *, trained: bool = False) -> int:
        total = 0
        for parameter in model.parameters():
            if parameter.requires_grad or not trained:
                count = getattr(parameter, "ds_numel", parameter.numel())
                total += count * (2 if half and parameter.is_floating_point() else parameter.element_size())
        return total

    gradients = size(trainer.model, trained=True)
    moments = _adam_moments(trainer)
    state = None
    if moments is not None:
        master = half or (deepspeed and stage in (1, 2))
        state = (moments + master) * (4 * count_parameters(trainer.model)[0] if half else gradients)
    return Memory(
        weights=size(trainer.model) // shares[3],
        gradients=gradients // shares[2],
        optimizer=None if state is None else state // shares[1],
        reference=0 if trainer.ref_model is None else size(trainer.ref_model) // shares[3],
    )


def _adam_moments(trainer: "GRPOVerlTrainer") -> int | None:
    """Numbers that the optimizer keeps for each trained one; `None`: not known."""
    given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if given is not None:
        return 2 if isinstance(given, torch.optim.Adam) else None
    plugin = trainer.args.deepspeed_plugin
    if plugin is not None and "optimizer" in plugin.hf_ds_config.config:
        return None
    return {"adamw_torch": 2, "adamw_torch_fused": 2, "sgd": 0}.get(str(trainer.args.optim).rpartition(".")[2].lower())


def _describe_memory(trainer: "GRPOVerlTrainer") -> str:
    memory = estimate_memory(trainer)
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "reference": memory.reference,
    }
    known = " + ".join(f"{name} {value / GIB:.3g}" for name, value in parts.items() if value)
    left_out = ["the optimizer's state"] if memory.optimizer is None else []
    left_out += ["activations", "logits", "sampling", *(["the teacher"] if trainer.args.teacher_model else [])]
    return f"{memory.total / GIB:.3g} GiB a rank = {known}; not counted: {', '.join(left_out)}"


# Checks. Each gives texts that name the setting, its value and the remedy; none stops the run


def check_end_of_turn(trainer: "GRPOVerlTrainer") -> list[str]:
    """Whether what closes an assistant turn in the chat template ends a response.

    A base model of Qwen has `<|endoftext|>` as its end token and a template that closes turns with `<|im_end|>`: its
    responses then go on to the last token allowed.
    """
    row = _first_row(trainer)
    if row is None or trainer.rollout_func is not None or not is_conversational(row):
        return []
    tokenizer, stops = trainer._tokenizer, trainer.eos_token_ids
    content = "Forty-two, I think."
    messages = [{"role": "user", "content": "What is six times seven?"}, {"role": "assistant", "content": content}]
    text = trainer.processing_class.apply_chat_template(
        prepare_multimodal_messages(messages) if trainer._is_vlm else messages,
        tokenize=False,
        chat_template=trainer.chat_template,
        **trainer.chat_template_kwargs,
    )
    _, found, tail = text.rpartition(content)
    ids = tokenizer(tail.strip(), add_special_tokens=False)["input_ids"] if found else []
    if not ids or not set(stops).isdisjoint(ids):
        return []
    named = [i for i in ids if i in tokenizer.added_tokens_decoder]
    closing = tokenizer.convert_ids_to_tokens(named[0]) if named else tail.strip()
    return [
        f"eos_token={tokenizer.eos_token!r}: the chat template closes an assistant turn with {closing!r}, which ends "
        f"no response (only {_tokens(trainer, stops)} does), so responses go on to max_completion_length="
        f"{trainer.args.max_completion_length}; set the tokenizer's eos_token={closing!r}, or add its id to "
        f"eos_token_id of the model's generation_config.json"
    ]


def check_prompt_lengths(trainer: "GRPOVerlTrainer") -> list[str]:
    """Whether prompts leave room for a response within the model's context; looks at `MAX_PROMPTS` at most."""
    context = context_length(trainer)
    if context is None or _first_row(trainer) is None or trainer._is_vlm or trainer.environment_factories is not None:
        return []
    name, tokens = context
    limit = trainer.args.max_completion_length
    prompts = _some_prompts(trainer.train_dataset)
    long = _lengths_above(tokens - limit, prompts, trainer)
    if not long:
        return []
    return [
        f"at least {len(long)} of {len(prompts)} prompts looked at (of {len(trainer.train_dataset)}) have more than "
        f"{max(tokens - limit, 0)} tokens ({name}={tokens} less max_completion_length={limit}), at most {max(long)}; "
        f"filter them out, lower max_completion_length, or take a model with a greater context"
    ]


def context_length(trainer: "GRPOVerlTrainer") -> tuple[str, int] | None:
    """The setting that bounds a row, and its tokens; `None`: nothing bounds it."""
    config = trainer.model.config.get_text_config()
    tokens = getattr(config, "max_position_embeddings", None)
    bounds = {}
    if isinstance(tokens, int):
        rope = getattr(config, "rope_parameters", None) or {}
        stretched = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
        bounds["max_position_embeddings"] = max(tokens, int(stretched))
    if trainer.args.use_vllm and trainer.args.vllm_max_model_length is not None:
        bounds["vllm_max_model_length"] = trainer.args.vllm_max_model_length
    return min(bounds.items(), key=lambda bound: bound[1], default=None)


def _some_prompts(dataset: Any) -> list:
    """From all over the dataset."""
    indices = range(0, len(dataset), -(-len(dataset) // MAX_PROMPTS))
    if isinstance(dataset, Dataset):
        return list(dataset.select_columns(["prompt"])[list(indices)]["prompt"])
    return [dataset[i]["prompt"] for i in indices]


def _lengths_above(limit: int, prompts: list, trainer: "GRPOVerlTrainer") -> list[int]:
    """Tokens of the prompts that have more than `limit`, or of most of them.

    The longest in bytes come first, and a batch without one ends the search: most datasets cost one batch. Bytes and
    not characters, since a character of Chinese takes as many tokens as several of English.
    """
    by_length = sorted(prompts, key=lambda prompt: len(str(prompt).encode(errors="replace")), reverse=True)
    found: list[int] = []
    for start in range(0, len(by_length), PROMPTS_AT_A_TIME):
        ids = trainer._tokenize_prompts(by_length[start : start + PROMPTS_AT_A_TIME])[0]
        long = [len(row) for row in ids if len(row) > limit]
        if not long:
            break
        found += long
    return found


class Trial(NamedTuple):
    """A prompt whose answer is known, and a wrong answer that looks like it."""

    row: dict[str, Any]
    gold: str
    wrong: str


def check_rewards(trainer: "GRPOVerlTrainer") -> list[str]:
    """Try the reward functions on a gold answer and a wrong one, in several forms (`FORMS`), in one call each.

    Only where the dataset has one of `GOLD_COLUMNS`, and where a call can be made as TRL makes it: async functions,
    reward models, and the columns of a `rollout_func` or an environment are left alone. Random states are put back; any
    other side effect of a function stays, so `preflight=False` turns the trial off with the rest.
    """
    tried = _triable(trainer)
    trial = find_trial(trainer.train_dataset) if tried else None
    if trial is None:
        return []
    warnings, total = [], np.zeros(len(FORMS))
    weights = trainer.reward_weights.tolist()
    for i in tried:
        name = trainer.reward_func_names[i]
        try:
            with _random_states_kept():
                rewards = _rewards_of(trainer, trainer.reward_funcs[i], trial)
        except Exception as error:
            warnings.append(
                f"reward function {name!r} raised {type(error).__name__} on a trial with the answer {trial.gold!r} "
                f"({' '.join(str(error).split())[:300]}); mend it, or set preflight=False if only the trial is at fault"
            )
            continue
        gold, wrong = weights[i] * rewards[: len(FORMS)], weights[i] * rewards[len(FORMS) :]
        lead = np.nan_to_num(gold - wrong)
        total += lead
        if (lead < 0).any() and not (lead > 0).any():
            worst = int(lead.argmin())
            warnings.append(
                f"reward function {name!r} gives the wrong answer {trial.wrong!r} more than the gold {trial.gold!r} "
                f"({wrong[worst]:g} against {gold[worst]:g}, times its weight); turn its sign round"
            )
    if not (warnings or (total > 0).any() or len(tried) < len(trainer.reward_funcs)):
        names = ", ".join(map(repr, trainer.reward_func_names))
        warnings.append(
            f"reward_funcs {names} give the gold answer {trial.gold!r} no more than the wrong one {trial.wrong!r}, "
            f"plain, after '####', in \\boxed{{}} or in <answer> tags; check the column that they compare with, or set "
            f"preflight=False if they read another form"
        )
    return warnings


def find_trial(dataset: Any) -> Trial | None:
    """A row with a gold answer, and the answer of another row that differs: the first two of the most similar length.

    The length is kept so that a reward that pays short or long responses takes no side. Looks at `MAX_GOLDS` rows;
    `None`: there is no such column, or all answers are the same.
    """
    columns = getattr(dataset, "column_names", None) or []
    column = next((name for name in GOLD_COLUMNS if name in columns), None)
    if column is None or not isinstance(dataset, Dataset):
        return None
    values = dataset.select_columns([column])[:MAX_GOLDS][column]
    golds = {i: final for i, value in enumerate(values) if (final := _final(value))}
    pairs = [(i, gold, other) for i, gold in golds.items() for other in golds.values() if _differs(other, gold)]
    if not pairs:
        return None
    row, gold, wrong = min(pairs, key=lambda pair: abs(len(pair[1]) - len(pair[2])))
    return Trial(dataset[row], gold, wrong)


def _final(value: Any) -> str:
    """The answer itself: of a worked solution what follows the last `####`; empty: there is none."""
    return str(value).rpartition("####")[2].strip() if isinstance(value, (str, int, float)) else ""


def _differs(one: str, other: str) -> bool:
    try:
        return float(one.replace(",", "")) != float(other.replace(",", ""))
    except ValueError:
        return one != other


def _triable(trainer: "GRPOVerlTrainer") -> list[int]:
    """Which reward functions can be called here as TRL calls them."""
    if trainer.rollout_func is not None or trainer.environment_factories is not None:
        return []
    functions = enumerate(trainer.reward_funcs)
    return [i for i, function in functions if not (isinstance(function, nn.Module) or is_async_callable(function))]


def _rewards_of(trainer: "GRPOVerlTrainer", function: Callable, trial: Trial) -> np.ndarray:
    """Of the gold answer in each form, then of the wrong one; NaN: no reward."""
    texts = [form.format(answer) for answer in (trial.gold, trial.wrong) for form in FORMS]
    row = trial.row
    if trainer.args.remove_unused_columns:  # as the data loader does
        trainer._set_signature_columns_if_needed()
        row = {name: value for name, value in row.items() if name in trainer._signature_columns}
    columns = {name: value for name, value in row.items() if name not in ("prompt", "completion", "completion_ids")}
    conversational = is_conversational(trial.row)
    # Past the trainer's own wrapper, which says once what it has to say
    function = getattr(function, "__wrapped__", function)
    rewards = function(
        prompts=[copy.deepcopy(trial.row["prompt"]) for _ in texts],
        completions=[[{"role": "assistant", "content": text}] if conversational else text for text in texts],
        completion_ids=[trainer._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts],
        **{name: [copy.deepcopy(value) for _ in texts] for name, value in columns.items()},
        trainer_state=trainer.state,
        log_extra=lambda column, values: None,
        log_metric=lambda name, value: None,
    )
    rewards = np.array([math.nan if reward is None else float(reward) for reward in rewards])
    if len(rewards) != len(texts):
        raise ValueError(f"it returned {len(rewards)} rewards for {len(texts)} completions")
    return rewards


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """A function that draws numbers must not change what a seeded run draws."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


# Report


def preflight_report(trainer: "GRPOVerlTrainer") -> str:
    """The plan, the parameters, the memory and the warnings as one text; loads nothing and stops nothing.

    Call it on every rank: a reward function that is tried may talk to the others.
    """
    dataset, model = trainer.train_dataset, trainer.model
    known = isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset)
    plan = BatchPlan.of(trainer.args, trainer.accelerator.num_processes, len(dataset) if known else None)
    trained, total = count_parameters(model)
    pad = trainer._tokenizer.pad_token_id
    # TRL cuts a response behind its first end token, so padding with an end token hides none
    padding = "the same token, harmless" if pad in trainer.eos_token_ids else _tokens(trainer, [pad])
    facts = {
        "parameters": f"{trained:,} trained of {total:,} ({100 * trained / max(total, 1):.3g} %)",
        "reference": reference_kind(trainer),
        "memory": _describe_memory(trainer),
        "end of a response": f"{_tokens(trainer, trainer.eos_token_ids)}; padding: {padding}",
    }
    left_out = _not_checked(trainer)
    if left_out:
        facts["not checked"] = left_out
    warnings = [
        text
        for what, check in (
            ("the end of a turn", check_end_of_turn),
            ("the lengths of prompts", check_prompt_lengths),
            ("the reward functions", check_rewards),
        )
        for text in _guarded(what, check, trainer)
    ]
    lines = [str(plan), *(f"{name}: {text}" for name, text in facts.items()), *(f"WARNING: {w}" for w in warnings)]
    return "\n".join(lines)


def print_preflight(trainer: "GRPOVerlTrainer") -> None:
    """Print the report once, on the main process; call it on every rank."""
    report = preflight_report(trainer)
    if trainer.accelerator.is_main_process:
        print(report, flush=True)


def _guarded(what: str, check: Callable[["GRPOVerlTrainer"], list[str]], trainer: "GRPOVerlTrainer") -> list[str]:
    """A check that fails is a warning: what is wrong with the data, training itself says when it comes to it."""
    try:
        return check(trainer)
    except Exception as error:
        return [f"{what} could not be checked ({type(error).__name__}: {' '.join(str(error).split())[:300]})"]


def _not_checked(trainer: "GRPOVerlTrainer") -> str:
    if _first_row(trainer) is None:
        return "prompts and rewards, since train_dataset is a stream"
    tried = set(_triable(trainer))
    untried = [name for i, name in enumerate(trainer.reward_func_names) if i not in tried]
    return f"rewards {', '.join(untried)} (async, a model, or in need of a rollout)" if untried else ""


def _first_row(trainer: "GRPOVerlTrainer") -> dict[str, Any] | None:
    """`None`: of a stream, which is not read before its time, or there is no dataset."""
    dataset = trainer.train_dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not len(dataset):
        return None
    return dataset[0]


def _tokens(trainer: "GRPOVerlTrainer", ids: list[int | None]) -> str:
    """`'<eos>' (1), ...`"""
    known = [i for i in ids if i is not None]
    return ", ".join(f"{trainer._tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in known) or "none"
