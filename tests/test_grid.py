"""The optimizer step does not depend on how its rows are split: into micro-batches, ranks, forwards, or by ZeRO.

Each cell trains 8 rows an optimizer step and is compared with the same rows as one micro-batch on one process. The
covering subset runs always, in one launch; the full product is slow, one launch for each backend:
`pytest -m slow tests/test_grid.py`.
"""

import copy
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grid_worker
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from grpo_ext import LOSS_AGG_MODES

LAUNCH_FILES = sorted((Path(__file__).parents[1] / "examples" / "accelerate").glob("*.yaml"))
ONE_PROCESS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # rows of a micro-batch, micro-batches of an optimizer step
TWO_RANKS = [(4, 1), (2, 2), (1, 4)]
BACKENDS = ["ddp", "zero1", "zero2", "zero3"]

# Parameters: difference over the size of the step, float32. Metrics: absolute and relative.
PARAMETERS = 1e-5
METRICS = 1e-6
# Under autocast each forward's weight gradients are rounded to bfloat16 (8 bits: 2**-9 = 0.002 relative) before they
# are added in float32; a row's own values are the same in every split, or differ by one such rounding.
BF16_PARAMETERS = 1e-2
BF16_METRICS = 1e-3

# What differs from a plain step
VARIANTS = {
    "plain": {},
    "two steps": {"windows": 2, "settings": {"max_steps": 2}},
    "two iterations": {"settings": {"num_iterations": 2, "max_steps": 2}},
    "tools": {"rollout": "tools"},
    "truncated": {"settings": {"mask_truncated_completions": True}},
}
ADVANTAGE_ONLY = {"use_kl_loss": False, "kl_loss_coef": 0.0, "entropy_coeff": 0.0}
EXTRAS = {
    "idle rank": {
        "rollout": "first prompt",
        "settings": {"mask_truncated_completions": True, "forward_layout": "padded"},
    },
    "one row": {"rollout": "one row", "settings": {"mask_truncated_completions": True}},
    "one row packed": {
        "rollout": "one row",
        "settings": {"mask_truncated_completions": True, "forward_layout": "packed"},
    },
    # As 4x1 the ranks' rows fill 2 and 3 forwards, and both must run 3
    "small forwards": {"settings": {"max_tokens_per_forward": 40}},
    "small packed forwards": {"settings": {"max_tokens_per_forward": 24, "forward_layout": "packed"}},
    "packed": {"settings": {"forward_layout": "packed"}},
    "padded": {"settings": {"forward_layout": "padded"}},
    "spared": {"reward": "flat", "settings": {**ADVANTAGE_ONLY, "calculate_entropy": False}},
    "spared, observed": {"reward": "flat", "settings": ADVANTAGE_ONLY},
    "group across ranks": {"settings": {"num_generations": 8}},
    "shuffled": {"settings": {"shuffle_mini_batches": True}},
    "lora": {"lora": True},
    "checkpointing": {"settings": {"activation_checkpointing": True}},
    "lora, checkpointing": {"lora": True, "settings": {"activation_checkpointing": True}},
    "lora, two iterations": {"lora": True, "settings": {"num_iterations": 2, "max_steps": 2}},
    # The KL term is k2: the gradient of k3 jumps from 13 to 0 where its clamp begins, and a token near it falls on
    # either side by rounding
    "bf16": {"settings": {"bf16": True, "kl_loss_type": "k2"}},
    # Gradients have a norm of about 3; left out, DeepSpeed's `gradient_clipping` is 1, here and in all the others
    "clipped": {"settings": {"max_grad_norm": 0.1, "learning_rate": 5.0}},
    "clipped, auto": {
        "settings": {"max_grad_norm": 0.1, "learning_rate": 5.0},
        "deepspeed": {"gradient_clipping": "auto"},
    },
}
# Every other policy loss, in a second update from the same responses, where the ratio is not 1. What looks at the whole
# step gets something to find: candidates, tokens to hold, weights to normalise.
TWICE = {"num_iterations": 2, "max_steps": 2}
POLICIES = {
    "gspo": {},
    "sapo": {},
    "gpg": {},
    "clip_cov": {"clip_cov_lb": 0.0, "clip_cov_ub": 100.0, "clip_cov_ratio": 0.1},
    "kl_cov": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0},
    "geo_mean": {},
    "cispo": {},
    "dppo_tv": {},
    "dppo_kl": {},
    "dro": {"dro_beta": 0.1},
    "bypass_mode": {"bypass_loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True},
}
POLICIES = {name: {"settings": {**TWICE, "policy_loss": name, **settings}} for name, settings in POLICIES.items()}
POLICIES |= {
    "bypass_mode, ppo_clip": {"settings": {**TWICE, "policy_loss": "bypass_mode"}},
    "rollout correction": {
        "settings": {
            **TWICE,
            "rollout_is": "sequence",
            "rollout_is_batch_normalize": True,
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": "1e-3_1.0",
        }
    },
}
BY_ROW = ("gspo", "sapo", "geo_mean")  # meant with, or always reduced by, seq-mean-token-mean
ALL = {**VARIANTS, **EXTRAS, **POLICIES}


def cell(variant: str, mode: str, backend: str, rows: int, accumulation: int) -> dict:
    """One cell, as `grid_worker.run_cell` takes it."""
    made = copy.deepcopy(ALL[variant])
    made |= {"backend": backend, "rows": rows, "accumulation": accumulation}
    made["settings"] = {**made.get("settings", {}), "loss_agg_mode": mode}
    return made


def name_of(key: tuple) -> str:
    variant, mode, backend, rows, accumulation = key
    return f"{variant}, {mode}, {backend} {rows}x{accumulation}"


def rotated(keys, modes=LOSS_AGG_MODES):
    """Give each (variant, backend, rows, accumulation) one of the modes, in turn."""
    for (variant, backend, rows, accumulation), mode in zip(keys, itertools.cycle(modes)):
        yield variant, "seq-mean-token-mean" if variant in BY_ROW else mode, backend, rows, accumulation


QUICK_ONE = [
    *(("plain", mode, "single", *split) for mode in LOSS_AGG_MODES for split in ((2, 4), (1, 8))),
    *rotated((variant, "single", *split) for variant, split in zip(list(ALL)[1:], itertools.cycle(ONE_PROCESS[1:]))),
]
QUICK_TWO = [
    *rotated(("plain", b, *s) for b, s in zip(BACKENDS * 3, itertools.cycle(TWO_RANKS))),
    *rotated(
        (variant, backend, *split)
        for variant, backends in {
            "two steps": ("ddp", "zero3"),
            "two iterations": ("zero2", "zero3"),
            "tools": ("zero1", "ddp"),
            "truncated": ("zero3", "zero2"),
            "idle rank": ("ddp", "zero3"),
            "one row": ("ddp", "zero3"),
            "one row packed": ("zero3",),
            "small forwards": ("ddp", "zero3"),
            "small packed forwards": ("ddp", "zero3"),
            "packed": ("ddp",),
            "padded": ("zero3",),
            "spared": ("ddp", "zero3"),
            "spared, observed": ("zero3",),
            "group across ranks": ("ddp",),
            "lora": ("zero3",),
            "checkpointing": ("zero3",),
            "lora, checkpointing": ("ddp",),
            "lora, two iterations": ("zero2",),
            "bf16": ("ddp",),
            "clipped": ("ddp", "zero1", "zero3"),
            "clipped, auto": ("zero2",),
            **{policy: (backend,) for policy, backend in zip(POLICIES, itertools.cycle(("ddp", "zero3")))},
        }.items()
        for backend in backends
        for split in ((4, 1) if "small" in variant else TWO_RANKS[(len(variant) + len(backend)) % 3],)
    ),
]
FULL = [
    *itertools.product(VARIANTS, LOSS_AGG_MODES),
    *itertools.product(EXTRAS, ("token-mean",)),
    *(
        (policy, mode)
        for policy in POLICIES
        for mode in (("seq-mean-token-mean",) if policy in BY_ROW else LOSS_AGG_MODES)
    ),
]


@functools.cache
def whole(variant: str, mode: str, as_on_ranks: int) -> dict:
    """The same rows as one micro-batch on one process."""
    return grid_worker.run_cell({**cell(variant, mode, "single", 8, 1), "as_on_ranks": as_on_ranks})


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def run_on_two_ranks(cells: dict[str, dict], folder: Path, timeout: float, launcher=TORCHRUN) -> dict[str, dict]:
    """Run cells in one process group; a launch that hangs is ended, with its log in the error."""
    (folder / "cells.json").write_text(json.dumps(cells))
    log = folder / "log.txt"
    command = [sys.executable, "-m", *launcher]
    command += [grid_worker.__file__, str(folder / "cells.json"), str(folder / "results.pt")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with log.open("w") as output:
        launched = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = launched.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(launched.pid, signal.SIGKILL)
            launched.wait()
            code = f"no end after {timeout:.0f} s"
    assert code == 0, f"{code}\n{log.read_text()[-8000:]}"
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory):
    """The results of the covering subset on two ranks, or of the part of it that pytest selected."""
    selected = [item for item in request.session.items if item.path == request.path]
    keys = [item.callspec.params["key"] for item in selected if item.originalname == "test_two_ranks"]
    # ZeRO-3 replaces `torch.nn.functional.linear` for good, which shows in bfloat16: DDP comes first
    keys.sort(key=lambda key: BACKENDS.index(key[2]))
    cells = {name_of(key): cell(*key) for key in keys}
    return run_on_two_ranks(cells, tmp_path_factory.mktemp("grid"), timeout=900)


def parameter_gap(result: dict, expected: dict) -> float:
    """Difference of the trained parameters over the size of the step."""
    assert torch.equal(result["before"], expected["before"])
    step = (expected["after"] - expected["before"]).norm()
    assert step > 0.01 and torch.isfinite(step)
    return ((result["after"] - expected["after"]).norm() / step).item()


def metric_gaps(result: dict, expected: dict) -> dict[str, float]:
    """By metric the largest difference over the steps, over 1 + its size; the loss over the size of its terms."""
    assert len(result["log"]) == len(expected["log"])
    gaps: dict[str, float] = {}
    for entry, wanted in zip(result["log"], expected["log"], strict=True):
        names = [name for name in wanted if name.startswith("actor/") or name in ("entropy", "loss")]
        assert "actor/pg_loss" in names and set(names) <= set(entry)
        for name in names:
            # The terms of the loss may cancel: float32 keeps 7 digits of them, and not of what is left
            terms = ("actor/pg_loss", "actor/kl_loss") if name == "loss" else (name,)
            gap = abs(entry[name] - wanted[name]) / (1 + sum(abs(wanted.get(term, 0.0)) for term in terms))
            gaps[name] = max(gaps.get(name, 0.0), gap)
    return gaps


def check(key: tuple, result: dict) -> tuple[float, float]:
    """Compare a cell with the whole; returns the parameters' gap and the metrics' largest."""
    variant, mode, backend, _, _ = key
    expected = whole(variant, mode, 1 if backend == "single" else 2)
    parameters, metrics = parameter_gap(result, expected), metric_gaps(result, expected)
    bf16 = variant == "bf16"
    assert parameters < (BF16_PARAMETERS if bf16 else PARAMETERS), name_of(key)
    for name, gap in metrics.items():
        assert gap < (BF16_METRICS if bf16 else METRICS), f"{name_of(key)}: {name}"
    if backend != "single":
        assert result["ranks agree"]
        counts = [[len(forwards) for forwards in rank] for rank in result["forwards"]]
        assert counts[0] == counts[1], "ranks must run equally many forwards"
        if variant.startswith("one row"):  # the other rank runs a forward without rows
            assert any(rows == 0 for rank in result["forwards"] for forwards in rank for rows in forwards)
    if variant == "plain" and mode == "token-mean":
        assert expected["log"][0]["grad_norm"] > 1, "or DeepSpeed's default clipping would not be noticed"
    return parameters, max(metrics.values())


@pytest.mark.parametrize("key", QUICK_ONE, ids=name_of)
def test_one_process(key):
    check(key, grid_worker.run_cell(cell(*key)))


@pytest.mark.parametrize("key", QUICK_TWO, ids=name_of)
def test_two_ranks(key, two_ranks):
    check(key, two_ranks[name_of(key)])


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_launch_files_are_accelerates(path):
    config = load_config_from_file(str(path))
    assert (config.num_processes, config.num_machines, config.mixed_precision) == (8, 1, "no")
    # A number would win over max_grad_norm, or contradict it
    assert config.deepspeed_config.get("gradient_clipping", "auto") == "auto"
    assert f"examples/accelerate/{path.name} examples/train_gsm8k.py" in path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_launch_files_start_two_ranks(path, tmp_path):
    if path.stem == "zero3_offload":
        pytest.skip("DeepSpeed would compile its CPU Adam")
    made = {**cell("clipped", "token-mean", "launched", 2, 2)}
    launcher = ["accelerate.commands.launch", "--config_file", str(path), "--num_processes", "2"]
    (result,) = run_on_two_ranks({path.stem: made}, tmp_path, 900, [*launcher, "--main_process_port", "0"]).values()
    assert result["distributed"] == {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(path.stem, "DEEPSPEED")
    if path.stem.startswith("zero"):
        assert result["zero_stage"] == int(path.stem[4])
        assert result["gradient_clipping"] == made["settings"]["max_grad_norm"]
    check(("clipped", "token-mean", path.stem, 2, 2), result)


def report(gaps: dict[tuple, tuple[float, float]]) -> None:
    """Print the largest differences; seen with `pytest -s`."""
    exact = {key: gap for key, gap in gaps.items() if key[0] != "bf16"}
    rounded = {key: gap for key, gap in gaps.items() if key[0] == "bf16"}
    for title, chosen in (("float32", exact), ("bf16", rounded)):
        for i, what in enumerate(("parameters", "metrics")):
            if chosen:
                worst = max(chosen, key=lambda key: chosen[key][i])
                print(
                    f"\n{title}: {len(chosen)} cells, {what} at most {chosen[worst][i]:.1e} ({name_of(worst)})", end=""
                )


@pytest.mark.slow
def test_full_grid_on_one_process():
    keys = [(*vm, "single", *split) for vm in FULL for split in ONE_PROCESS[1:]]
    report({key: check(key, grid_worker.run_cell(cell(*key))) for key in keys})


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_full_grid_on_two_ranks(backend, tmp_path):
    keys = [(*vm, backend, *split) for vm in FULL for split in TWO_RANKS if backend == "ddp" or vm[0] != "bf16"]
    results = run_on_two_ranks({name_of(key): cell(*key) for key in keys}, tmp_path, timeout=3600)
    report({key: check(key, results[name_of(key)]) for key in keys})
