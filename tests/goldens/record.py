"""Record golden numbers from verl 0.9.1: `python tests/goldens/record.py [--out DIR] [NAME ...]`.

The only file of the project that imports verl; no test does. Run it in a scratch environment (see
README.md beside this file). Each `record_NAME` calls verl's own functions on small hand-made
inputs and becomes `NAME.json`, which carries every input, so that no test needs verl or a random
number. Running it twice writes the same bytes.
"""

import argparse
import json
import math
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import verl  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.config import AlgoConfig, KLControlConfig, RolloutCorrectionConfig  # noqa: E402
from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.utils.metric import Metric  # noqa: E402
from verl.workers.config import (  # noqa: E402
    DistillationConfig,
    DistillationLossConfig,
    FSDPActorConfig,
    PolicyLossConfig,
)
from verl.workers.utils.losses import ppo_loss  # noqa: E402

RECORDED = "2026-11-29"  # the day of the recording that is committed; change it when recording anew
MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "token-sum",
)
# A micro-batch of a larger optimizer step on four data-parallel ranks.
LARGER_STEP = {
    "dp_size": 4,
    "batch_num_tokens": 61,
    "global_batch_size": 12,
    "loss_scale_factor": 16,
}
ALONE = {
    "dp_size": 1,
    "batch_num_tokens": None,
    "global_batch_size": None,
    "loss_scale_factor": None,
}


# ------------------------------------------------------------------------------------- plumbing
def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def plain(value):
    """Turn tensors, numpy scalars and non-finite floats into what JSON can hold."""
    if isinstance(value, torch.Tensor):
        return plain(value.detach().tolist())
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def dump(value, indent=0):
    """JSON with one line per row of numbers, so that a difference shows where it is."""
    if isinstance(value, dict) and value:
        flat = json.dumps(value)
        if len(flat) <= 90:
            return flat
        pad = " " * (indent + 1)
        items = (f"{pad}{json.dumps(k)}: {dump(v, indent + 1)}" for k, v in value.items())
        return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        pad = " " * (indent + 1)
        rows = ",\n".join(f"{pad}{dump(v, indent + 1)}" for v in value)
        return "[\n" + rows + "\n" + " " * indent + "]"
    return json.dumps(value)


def case(name, inputs, settings, outputs):
    return {
        "name": name,
        "inputs": plain(inputs),
        "settings": plain(settings),
        "outputs": plain(outputs),
    }


def golden(function, cases, dtype="float64", **more):
    names = [entry["name"] for entry in cases]
    assert len(names) == len(set(names)), "two cases share a name"
    provenance = {
        "verl": verl.__version__,
        "torch": torch.__version__,
        "recorded": RECORDED,
        "dtype": dtype,
        "function": function,
        **more,
    }
    return {"provenance": provenance, "cases": cases}


def actor_config(policy_loss=None, **settings):
    return FSDPActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=2,
        policy_loss=PolicyLossConfig(**(policy_loss or {})),
        **settings,
    )


# --------------------------------------------------------------------------------------- inputs
# Five rows of seven tokens: a full one, one that ends early, one with holes (tool output), one
# wholly masked, one a token short. What lies outside the mask is finite and must not matter.
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 1],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
    ],
    dtype=torch.bool,
)
LOG_PROB = f64(
    [
        [-0.31, -1.27, -0.08, -2.45, -0.52, -0.17, -0.64],
        [-0.93, -1.85, -3.12, -25.6, -0.44, -1.01, -0.29],
        [-0.12, -2.03, -0.75, -0.36, -1.48, -0.57, -0.02],
        [-1.11, -0.23, -4.02, -0.68, -0.05, -1.94, -2.71],
        [-0.41, -25.9, -1.63, -0.15, -0.27, -3.38, -0.82],
    ]
)
# log_prob - old_log_prob. "wild" meets every regime: inside the clip, above, below, above c = 3
# and c = 10, and the clamp at +-20, each with advantages of both signs.
WILD = f64(
    [
        [0.0, 0.05, 0.30, 0.60, 1.20, 2.50, 25.0],
        [-0.05, -0.30, -0.60, -25.0, 0.40, -0.10, 3.00],
        [0.25, -0.22, 9.00, 1.50, 0.19, -8.00, 2.31],
        [0.70, -0.40, 2.00, -1.00, 0.10, 0.90, -3.00],
        [25.0, -25.0, 0.10, -0.18, 1.05, 0.27, 0.33],
    ]
)
MODERATE = f64(
    [
        [0.03, -0.12, 0.24, 0.41, -0.35, 0.08, 0.17],
        [-0.26, 0.11, -0.07, 0.52, 0.33, -0.48, 0.09],
        [0.29, -0.31, 0.14, 0.02, 0.37, -0.16, -0.21],
        [0.13, 0.28, -0.39, 0.06, -0.02, 0.19, 0.44],
        [-0.14, 0.22, 0.31, -0.44, -0.19, 0.05, 0.27],
    ]
)
ADVANTAGES = {
    "wild": f64(
        [
            [1.0, -0.7, 0.9, -1.1, -0.8, -1.3, 0.85],
            [0.6, 0.8, -0.9, -1.2, 0.3, -0.2, 1.7],
            [-1.5, -0.4, 2.0, 0.7, 1.4, -2.0, -0.6],
            [0.9, -1.6, 0.4, 1.2, -0.3, 0.8, -0.1],
            [-0.5, 0.75, 0.0, -1.0, -2.0, 0.35, 1.1],
        ]
    ),
    "moderate": f64([[1.2], [-0.8], [0.5], [0.3], [-1.4]]).expand(5, 7).clone(),
}
IS_WEIGHTS = f64(
    [
        [1.0, 0.52, 1.37, 2.0, 0.88, 0.13, 1.05],
        [0.71, 1.94, 0.45, 1.22, 0.3, 2.0, 0.6],
        [1.61, 0.97, 2.0, 0.25, 1.15, 0.4, 0.82],
        [0.5, 1.5, 0.9, 1.1, 0.7, 1.3, 2.0],
        [0.94, 1.08, 0.66, 1.75, 0.39, 1.42, 0.2],
    ]
)
ENTROPY = f64(
    [
        [0.82, 1.94, 0.35, 2.51, 1.07, 0.48, 1.33],
        [1.76, 2.22, 2.9, 0.61, 1.4, 0.73, 0.15],
        [0.27, 2.08, 1.19, 0.9, 1.68, 1.02, 0.06],
        [1.5, 0.4, 3.1, 1.25, 0.11, 2.02, 2.6],
        [0.99, 1.31, 1.87, 0.22, 0.69, 2.74, 1.56],
    ]
)
# log_prob - ref_log_prob
REF_GAP = f64(
    [
        [0.2, -0.15, 0.05, 0.9, -0.6, 0.0, 1.3],
        [-0.4, 0.35, -2.9, 3.0, 0.5, 0.1, -0.8],
        [0.7, -1.1, 0.3, 0.08, -0.25, 0.6, 0.45],
        [1.0, -0.5, 0.2, -0.9, 0.15, 0.75, -1.4],
        [-0.1, -24.0, 0.55, -0.3, 0.12, 2.1, 0.4],
    ]
)


LOG_RATIO = {"wild": WILD, "moderate": MODERATE, "on_policy": torch.zeros_like(WILD)}


def short(tensor):
    """Four decimals: inputs stay readable in the file."""
    return (tensor * 1e4).round() / 1e4


def policy_inputs(kind):
    """log_prob, old_log_prob, advantages and mask of one of the tables above."""
    return {
        "log_prob": LOG_PROB.clone(),
        "old_log_prob": short(LOG_PROB - LOG_RATIO[kind]),
        "advantages": ADVANTAGES["moderate" if kind == "moderate" else "wild"],
        "response_mask": MASK,
    }


# ------------------------------------------------------------------------------------ kl_penalty
def record_kl_penalty():
    gaps = f64(
        [
            [0.0, 0.1, -0.1, 0.5, -0.5, 1.0],
            [-1.0, 2.0, -2.0, 2.6, -2.55, -2.65],
            [3.0, -3.0, 19.5, -19.5, 25.0, -25.0],
            [0.03, -0.07, 0.7, -1.3, 5.0, -6.0],
        ]
    )
    ref = f64(
        [
            [-0.5, -1.2, -0.3, -2.0, -0.9, -3.1],
            [-0.4, -2.5, -0.7, -4.0, -1.1, -0.2],
            [-3.5, -0.6, -20.0, -1.4, -26.0, -0.8],
            [-1.9, -0.1, -2.2, -0.35, -5.6, -0.45],
        ]
    )
    weights = f64(
        [
            [1.0, -0.5, 2.0, 0.25, 1.5, -1.0],
            [0.75, 1.25, -2.0, 0.5, 1.0, 3.0],
            [-0.25, 1.75, 0.4, -1.5, 0.6, 1.1],
            [2.5, -0.8, 0.9, 1.3, -0.7, 0.2],
        ]
    )
    log_prob = short(ref + gaps)
    cases = []
    for base in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
        for name in (base, base + "+"):
            leaf = log_prob.clone().requires_grad_()
            values = core_algos.kl_penalty(leaf, ref, name)
            (values * weights).sum().backward()
            cases.append(
                case(
                    name,
                    {"log_prob": log_prob, "ref_log_prob": ref, "weights": weights},
                    {"kl_penalty": name},
                    {"values": values, "grad_log_prob": leaf.grad},
                )
            )
    return golden("verl.trainer.ppo.core_algos.kl_penalty", cases)


# -------------------------------------------------------------------------------------- agg_loss
def record_agg_loss():
    loss_mat = f64(
        [
            [0.4, -1.3, 2.2, 0.7, -0.6, 1.9, 0.05],
            [3.1, -0.2, 0.8, -2.4, 5.0, -5.0, 1.0],
            [-0.9, 1.6, 7.0, 0.3, -1.1, 4.0, 2.6],
            [1.5, 2.5, -3.5, 4.5, -0.5, 6.0, 0.2],
            [0.95, -0.45, 1.15, 0.1, -2.05, 0.35, -7.0],
        ]
    )
    uneven = torch.tensor([[1.0] * 8, [5.0] * 2 + [9.0] * 6], dtype=torch.float64)
    uneven_mask = torch.tensor([[1] * 8, [1] * 2 + [0] * 6], dtype=torch.bool)
    counts = [
        ("alone", ALONE),
        ("alone_scaled", {**ALONE, "loss_scale_factor": 10}),
        ("counts_dp1", {**LARGER_STEP, "dp_size": 1, "loss_scale_factor": None}),
        ("counts_dp1_scaled", {**LARGER_STEP, "dp_size": 1}),
        ("counts_dp4", {**LARGER_STEP, "loss_scale_factor": None}),
        ("counts_dp4_scaled", LARGER_STEP),
    ]
    tensors = [
        ("rows", loss_mat, MASK),
        ("nothing_masked", loss_mat, torch.ones_like(MASK)),
        ("worked_example", uneven, uneven_mask),
        ("all_masked", loss_mat[:2], torch.zeros_like(MASK[:2])),
    ]
    cases = []
    for which, mat, mask in tensors:
        for mode in MODES:
            for label, info in counts:
                if which in ("worked_example", "nothing_masked") and label != "alone":
                    continue
                if which == "all_masked" and label not in ("alone", "counts_dp4_scaled"):
                    continue
                leaf = mat.clone().requires_grad_()
                loss = core_algos.agg_loss(leaf, mask, mode, **info)
                loss.backward()
                cases.append(
                    case(
                        f"{which}/{mode}/{label}",
                        {"loss_mat": mat, "loss_mask": mask},
                        {"loss_agg_mode": mode, **info},
                        {"loss": loss, "grad_loss_mat": leaf.grad},
                    )
                )
    return golden("verl.trainer.ppo.core_algos.agg_loss", cases)


# ----------------------------------------------------------------------------------- policy_loss
def run_policy_loss(name, loss_mode, inputs, mode, info, weights=None, policy=None, seed=None, **cfg):
    """One call of a registered policy loss: the loss, its gradient and all its metrics."""
    cfg = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **cfg}
    policy = dict(policy or {})
    shown = dict(policy)
    if "rollout_correction" in policy:
        policy["rollout_correction"] = RolloutCorrectionConfig(**policy["rollout_correction"])
    config = actor_config({"loss_mode": loss_mode, **policy}, global_batch_info=dict(info), **cfg)
    leaf = inputs["log_prob"].clone().requires_grad_()
    drawn = []
    if seed is not None:
        torch.manual_seed(seed)
        original = torch.randperm

        def watched(*args, **kwargs):
            drawn.append(original(*args, **kwargs))
            return drawn[-1]

        torch.randperm = watched
    try:
        loss, metrics = core_algos.get_policy_loss_fn(loss_mode)(
            old_log_prob=inputs["old_log_prob"],
            log_prob=leaf,
            advantages=inputs["advantages"],
            response_mask=inputs["response_mask"],
            loss_agg_mode=mode,
            config=config,
            rollout_is_weights=weights,
        )
    finally:
        if seed is not None:
            torch.randperm = original
    loss.backward()
    outputs = {"loss": loss, "grad_log_prob": leaf.grad, "metrics": metrics}
    settings = {"loss_mode": loss_mode, "loss_agg_mode": mode, **cfg, "policy_loss": shown, **info}
    if seed is not None:
        settings["seed"] = seed
        outputs["permutations"] = drawn
    all_inputs = dict(inputs)
    all_inputs["rollout_is_weights"] = weights
    return case(name, all_inputs, settings, outputs)


def specific_policy_losses(loss_mode):
    """The settings that only this loss has, as (label, inputs, keyword arguments)."""
    wild, moderate, level = (policy_inputs(kind) for kind in ("wild", "moderate", "on_policy"))
    if loss_mode == "vanilla":
        masked = {**wild, "response_mask": torch.zeros_like(MASK)}
        return [
            ("c10", wild, {"clip_ratio_c": 10.0}),
            ("c1.5_tighter_than_the_clip", wild, {"clip_ratio_c": 1.5, "clip_ratio_high": 0.9}),
            (
                "bounds_fall_back",
                wild,
                {"clip_ratio": 0.3, "clip_ratio_low": None, "clip_ratio_high": None},
            ),
            ("only_low_falls_back", wild, {"clip_ratio": 0.1, "clip_ratio_low": None}),
            ("wholly_masked", masked, {}),
            ("wholly_masked_with_counts", masked, {"info": LARGER_STEP}),
            ("row_constant_c10", moderate, {"clip_ratio_c": 10.0}),
        ]
    if loss_mode in ("dppo_tv", "dppo_kl"):
        return [
            ("c20", wild, {"clip_ratio_c": 20.0}),
            ("c1.5", moderate, {"clip_ratio_c": 1.5}),
            ("narrow", moderate, {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05}),
            (
                "bounds_fall_back",
                wild,
                {"clip_ratio": 0.15, "clip_ratio_low": None, "clip_ratio_high": None},
            ),
        ]
    if loss_mode == "gspo":
        far = {**moderate, "old_log_prob": moderate["log_prob"] - 12.0}
        narrow = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "mode": "seq-mean-token-mean"}
        return [
            ("paper_bounds", moderate, narrow),
            ("clamped_at_10", far, {"mode": "seq-mean-token-mean"}),
        ]
    if loss_mode == "sapo":
        return [
            ("other_taus", moderate, {"tau_pos": 2.0, "tau_neg": 3.5}),
            ("mode_is_ignored", moderate, {"mode": "token-sum", "info": LARGER_STEP}),
        ]
    if loss_mode == "clip_cov":
        every = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 30.0}
        none = {"clip_cov_ratio": 0.5, "clip_cov_lb": 1e6, "clip_cov_ub": 1e9}
        some = {"clip_cov_ratio": 0.15, "clip_cov_lb": 0.05, "clip_cov_ub": 30.0}
        return [
            ("every_candidate", moderate, {"policy": every, "seed": 0}),
            ("no_candidate", moderate, {"policy": none, "seed": 0}),
            ("a_draw", moderate, {"policy": some, "seed": 7}),
            ("another_draw", wild, {"policy": some, "seed": 11}),
        ]
    if loss_mode == "kl_cov":
        return [
            ("some", moderate, {"policy": {"kl_cov_ratio": 0.25, "ppo_kl_coef": 1.0}}),
            ("all", moderate, {"policy": {"kl_cov_ratio": 1.0, "ppo_kl_coef": 0.5}}),
            ("some_wild", wild, {"policy": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.1}}),
        ]
    if loss_mode == "geo_mean":
        return [("wide", moderate, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4})]
    if loss_mode == "cispo":
        return [("open_below", wild, {"clip_ratio_low": 10.0, "clip_ratio_high": 0.2})]
    if loss_mode == "dro":
        return [("beta_2", moderate, {"policy": {"dro_beta": 2.0}})]
    if loss_mode == "bypass_mode":
        return bypass_policy_losses(wild, moderate)
    return [("on_policy_rows", level, {})]


def bypass_policy_losses(wild, moderate):
    settings = []
    for loss_type in ("ppo_clip", "reinforce"):
        for label, correction in (
            ("plain", {"rollout_is": None}),
            ("dataclass_defaults", {}),
            ("token_tis", {"rollout_is": "token", "rollout_is_threshold": 1.3}),
            ("token_icepop", {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"}),
            (
                "sequence_normalized",
                {
                    "rollout_is": "sequence",
                    "rollout_is_threshold": 1.5,
                    "rollout_is_batch_normalize": True,
                },
            ),
            (
                "token_k1",
                {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.3"},
            ),
            (
                "token_tis_and_seq_sum_k3",
                {
                    "rollout_is": "token",
                    "rollout_rs": "seq_sum_k3",
                    "rollout_rs_threshold": 0.2,
                },
            ),
        ):
            policy = {"rollout_correction": {"loss_type": loss_type, **correction}}
            settings.append((f"{loss_type}/{label}", moderate, {"policy": policy}))
            if label in ("plain", "token_k1"):
                larger = {"policy": policy, "info": LARGER_STEP, "mode": "seq-mean-token-sum"}
                settings.append((f"{loss_type}/{label}_with_counts", wild, larger))
    return settings


def record_policy_loss():
    registry = list(core_algos.POLICY_LOSS_REGISTRY)
    cases = []
    for loss_mode in registry:
        base = {}
        if loss_mode == "dro":
            base = {"policy": {"dro_beta": 0.5}}
        if loss_mode == "clip_cov":  # too high a lower bound for a candidate: nothing is drawn
            base = {"policy": {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1e6, "clip_cov_ub": 1e9}}
        if loss_mode == "bypass_mode":
            base = {"policy": {"rollout_correction": {"rollout_is": None}}}
        wild, moderate = policy_inputs("wild"), policy_inputs("moderate")

        def run(label, inputs, mode, info, loss_mode=loss_mode, **kwargs):
            cases.append(run_policy_loss(f"{loss_mode}/{label}", loss_mode, inputs, mode, info, **kwargs))

        for mode in MODES:
            run(f"wild/{mode}/alone", wild, mode, ALONE, **base)
            run(f"wild/{mode}/larger_step", wild, mode, LARGER_STEP, **base)
        run("moderate/token-mean/alone", moderate, "token-mean", ALONE, **base)
        run("on_policy/token-mean/alone", policy_inputs("on_policy"), "token-mean", ALONE, **base)
        run("wild/weights", wild, "token-mean", ALONE, weights=IS_WEIGHTS, **base)
        run("moderate/weights", moderate, "seq-mean-token-mean", LARGER_STEP, weights=IS_WEIGHTS, **base)
        for label, inputs, kwargs in specific_policy_losses(loss_mode):
            kwargs = {**base, **kwargs}
            mode = kwargs.pop("mode", "token-mean")
            run(label, inputs, mode, kwargs.pop("info", ALONE), **kwargs)
    return golden("verl.trainer.ppo.core_algos.get_policy_loss_fn", cases, registry=registry)


# -------------------------------------------------------------------------------------- ppo_loss
PROMPT = 2  # prompt tokens per row; verl slices the responses out of prompt + response


def row_lengths(mask):
    """Response lengths: up to the last trained token; a wholly masked row keeps its full length."""
    width = mask.shape[1]
    return [int(row.nonzero()[-1]) + 1 if row.any() else width for row in mask]


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def packed(matrix, lengths):
    """A (B, T) matrix as the engine's outputs are laid out: nested prompt + response rows.

    The value of response token t sits one place before the token, as model outputs do.
    """
    rows = []
    for row, length in zip(matrix, lengths, strict=True):
        before = row.new_zeros(PROMPT - 1, *row.shape[1:])
        after = row.new_zeros(1, *row.shape[1:])
        rows.append(torch.cat([before, row[:length], after]))
    offsets = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def engine_batch(inputs, info, names):
    """The TensorDict that verl's engine hands to its loss: jagged rows and the step's counts."""
    mask = inputs["response_mask"]
    lengths = row_lengths(mask)
    tensors = {
        "prompts": jagged([torch.zeros(PROMPT, dtype=torch.int64) for _ in lengths]),
        "responses": jagged([torch.zeros(length, dtype=torch.int64) for length in lengths]),
    }
    for key, name in names.items():
        rows = inputs[name]
        tensors[key] = jagged([row[:length].clone() for row, length in zip(rows, lengths, strict=True)])
    data = TensorDict(tensors, batch_size=[len(lengths)])
    tensordict_utils.assign_non_tensor(
        data,
        dp_size=info["dp_size"],
        batch_num_tokens=info["batch_num_tokens"],
        global_batch_size=info["global_batch_size"],
    )
    return data, lengths


def shown_metrics(metrics):
    shown = {}
    for key, value in metrics.items():
        if isinstance(value, Metric):
            assert len(value.values) == 1
            shown[key] = {"value": value.values[0], "aggregation": value.aggregation.value}
        else:
            shown[key] = {"value": value, "aggregation": None}
    return shown


def step_metrics(collected):
    """What verl's trainer reports for the step: each metric reduced over its micro-batches."""
    step = {}
    for metrics in collected:
        for key, value in metrics.items():
            if isinstance(value, Metric):
                step.setdefault(key, value.init_list()).append(value)
            else:
                step.setdefault(key, []).append(value)
    return verl.utils.metric.reduce_metrics(step)


BATCH_NAMES = {
    "response_mask": "response_mask",
    "old_log_probs": "old_log_prob",
    "advantages": "advantages",
}


def run_ppo_loss(name, inputs, micro_batches, info, with_entropy=True, policy=None, **cfg):
    """One optimizer step of verl's engine loss, micro-batch by micro-batch."""
    cfg = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **cfg}
    micro, collected, total = [], [], 0.0
    for rows in micro_batches:
        part = {key: value[rows] for key, value in inputs.items()}
        names = dict(BATCH_NAMES)
        if "ref_log_prob" in part:
            names["ref_log_prob"] = "ref_log_prob"
        if "rollout_is_weights" in part:
            names["rollout_is_weights"] = "rollout_is_weights"
        data, lengths = engine_batch(part, info, names)
        leaf = part["log_prob"].clone().requires_grad_()
        entropy = part["entropy"].clone().requires_grad_()
        output = {"log_probs": packed(leaf, lengths)}
        if with_entropy:
            output["entropy"] = packed(entropy, lengths)
        config = actor_config(policy, loss_scale_factor=info["loss_scale_factor"], **cfg)
        loss, metrics = ppo_loss(config, output, data)
        loss.backward()
        total += loss.item()
        collected.append(metrics)
        micro.append(
            {
                "rows": rows,
                "padded_length": max(lengths),
                "loss": loss,
                "grad_log_prob": leaf.grad,
                "grad_entropy": entropy.grad if with_entropy else None,
                "metrics": shown_metrics(metrics),
            }
        )
    shown = dict(inputs)
    if not with_entropy:
        shown["entropy"] = None
    outputs = {"loss": total, "micro_batches": micro, "step_metrics": step_metrics(collected)}
    settings = {**cfg, "policy_loss": policy or {}, "micro_batches": micro_batches, **info}
    return case(name, shown, settings, outputs)


def record_ppo_loss():
    valid = int(MASK.sum())
    step = {
        "dp_size": 1,
        "batch_num_tokens": valid,
        "global_batch_size": 5,
        "loss_scale_factor": None,
    }
    split = [[0, 1, 2], [3, 4]]

    def inputs(kind="moderate", ref=True, weights=False):
        tensors = {**policy_inputs(kind), "entropy": ENTROPY}
        if ref:
            tensors["ref_log_prob"] = short(LOG_PROB - REF_GAP)
        if weights:
            tensors["rollout_is_weights"] = IS_WEIGHTS
        return tensors

    cases = []

    def run(name, tensors, micro=split, info=step, **kwargs):
        cases.append(run_ppo_loss(name, tensors, micro, info, **kwargs))

    full = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.001}
    run("policy_only", inputs(ref=False), with_entropy=False)
    run("entropy_coeff_0_is_still_reported", inputs(ref=False))
    for mode in MODES:
        run(f"full/{mode}/one_rank", inputs(), loss_agg_mode=mode, **full)
        run(f"full/{mode}/larger_step", inputs(), info=LARGER_STEP, loss_agg_mode=mode, **full)
    for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k2+", "low_var_kl+", "k3+"):
        run(f"kl_type/{kind}", inputs(), **{**full, "kl_loss_coef": 0.1, "kl_loss_type": kind})
    run("wild_c10", inputs("wild"), clip_ratio_c=10.0, **full)
    run("on_policy", inputs("on_policy"), **full)
    run("weights", inputs(weights=True), **full)
    run("one_micro_batch", inputs(), micro=[[0, 1, 2, 3, 4]], **full)
    run("rows_alone", inputs(), micro=[[0], [1], [2], [3], [4]], **full)
    run("no_counts", inputs(), micro=[[0, 1, 2, 3, 4]], info=ALONE, **full)
    run("no_counts_two_micro_batches", inputs(), info=ALONE, **full)
    for label, scale in (("none", None), ("constant", 16)):
        run(
            f"horizon/{label}",
            inputs(),
            micro=[[0, 2, 3, 4], [1]],
            info={**step, "loss_scale_factor": scale},
            loss_agg_mode="seq-mean-token-sum-norm",
            **full,
        )
    for loss_mode, mode in (
        ("gspo", "seq-mean-token-mean"),
        ("sapo", "token-mean"),
        ("gpg", "token-mean"),
        ("cispo", "token-mean"),
        ("geo_mean", "token-mean"),
        ("dppo_tv", "token-mean"),
    ):
        run(f"policy/{loss_mode}", inputs(), policy={"loss_mode": loss_mode}, loss_agg_mode=mode, **full)
    run("policy/dro", inputs(), policy={"loss_mode": "dro", "dro_beta": 0.5}, **full)
    cov = {"loss_mode": "kl_cov", "kl_cov_ratio": 0.25, "ppo_kl_coef": 1.0}
    run("policy/kl_cov", inputs(), policy=cov, **full)
    return golden("verl.workers.utils.losses.ppo_loss", cases)


# ------------------------------------------------------------------------------------ advantages
def advantage_inputs(rewards, lengths, groups, width=6):
    """Outcome rewards on the last token of each row (as verl's reward managers place them)."""
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    token_rewards = torch.zeros(len(lengths), width, dtype=torch.float64)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        mask[row, :length] = 1
        token_rewards[row, max(length, 1) - 1] = reward
    return {"token_level_rewards": token_rewards, "response_mask": mask, "index": groups}


def run_advantage(name, estimator, inputs, settings=None, dtype="float64", **more):
    settings = dict(settings or {})
    call = {
        "token_level_rewards": inputs["token_level_rewards"].clone(),
        "response_mask": inputs["response_mask"].clone(),
        **more,
    }
    if estimator not in ("remax", "reinforce_plus_plus"):
        call["index"] = np.array(inputs["index"], dtype=object)
    algo = {key: value for key, value in settings.items() if key != "handle_zero_tail"}
    if estimator in ("grpo", "grpo_vectorized"):
        call.update(settings)
    else:
        call["config"] = AlgoConfig(**algo)
        if "handle_zero_tail" in settings:
            call["handle_zero_tail"] = settings["handle_zero_tail"]
        if estimator == "gdpo":
            call["norm_adv_by_std_in_grpo"] = settings.get("norm_adv_by_std_in_grpo", True)
    advantages, returns = core_algos.get_adv_estimator_fn(estimator)(**call)
    extra = {key: value for key, value in more.items() if isinstance(value, torch.Tensor)}
    return case(
        name,
        {**inputs, **extra},
        {"adv_estimator": estimator, "dtype": dtype, **settings},
        {"advantages": advantages, "returns": returns},
    )


def record_advantages():
    # 33 (or 17) trained tokens: there verl's float32 factor n/(n-1) of the variance is exact.
    lengths = [6, 3, 0, 5, 6, 4, 6, 3]
    groups = ["a", "a", "a", "a", "b", "b", "b", "c"]
    mixed = advantage_inputs([1.0, 0.0, 0.5, 2.5, -1.0, 0.25, 0.75, 0.6], lengths, groups)
    binary = advantage_inputs([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0], lengths, groups)
    shuffled = advantage_inputs(
        [1.0, -1.0, 0.6, 0.0, 0.25, 0.5, 0.75, 2.5],
        [6, 6, 3, 3, 4, 0, 6, 5],
        ["a", "b", "c", "a", "b", "a", "b", "a"],
    )
    equal_exact = advantage_inputs([0.5] * 4 + [1.0] * 4, lengths, ["a"] * 4 + ["b"] * 4)
    equal_noisy = advantage_inputs([0.7] * 8, lengths, ["a"] * 8)
    no_single = advantage_inputs([1.0, 0.0, 0.5, 2.5, -1.0, 0.25, 0.75, 0.25], lengths, ["a"] * 4 + ["b"] * 4)
    tables = {
        "two_uneven_groups_and_a_single": mixed,
        "binary": binary,
        "shuffled": shuffled,
        "equal_rewards": equal_exact,
        "equal_rewards_with_float_noise": equal_noisy,
    }
    cases = []
    for estimator in ("grpo", "grpo_vectorized"):
        dtype = "float32" if estimator == "grpo_vectorized" else "float64"
        for table, inputs in tables.items():
            for norm in (True, False):
                settings = {"norm_adv_by_std_in_grpo": norm}
                cases.append(run_advantage(f"{estimator}/{table}/std_{norm}", estimator, inputs, settings, dtype))
    # What verl computes in practice: float32 rewards, whose noise the standard deviation blows up.
    for table in ("two_uneven_groups_and_a_single", "equal_rewards_with_float_noise"):
        inputs = dict(tables[table])
        inputs["token_level_rewards"] = inputs["token_level_rewards"].to(torch.float32)
        settings = {"norm_adv_by_std_in_grpo": True}
        cases.append(run_advantage(f"grpo/{table}/float32", "grpo", inputs, settings, "float32"))
    for norm in (True, False):
        for table, inputs in (("two_groups", no_single), ("equal_rewards", equal_exact)):
            name = f"grpo_passk/{table}/std_{norm}"
            cases.append(run_advantage(name, "grpo_passk", inputs, {"norm_adv_by_std_in_grpo": norm}))
    for estimator in ("rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline"):
        for table in ("two_uneven_groups_and_a_single", "binary", "shuffled", "equal_rewards"):
            cases.append(run_advantage(f"{estimator}/{table}", estimator, tables[table]))

    # Dense token rewards (as after KL in reward) and a mask with holes.
    holes = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 0, 0], [1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 1]])
    dense = {
        "token_level_rewards": f64(
            [
                [-0.1, 0.05, 0.3, -0.2, 0.0, 1.0],
                [0.02, 0.4, -0.15, 0.8, 0.0, 0.0],
                [0.1, -0.3, 0.25, 0.6, -0.05, 0.5],
                [0.0, 0.07, -0.01, 0.2, 0.9, -1.0],
            ]
        ),
        "response_mask": holes,
        "index": ["a", "a", "b", "b"],
    }
    for gamma in (1.0, 0.9):
        for table, inputs in (("outcome", mixed), ("dense_with_holes", dense)):
            name = f"reinforce_plus_plus/{table}/gamma_{gamma}"
            cases.append(run_advantage(name, "reinforce_plus_plus", inputs, {"gamma": gamma}))
    baselines = f64([0.3, 0.3, 0.3, 0.3, -0.2, -0.2, -0.2, 0.6])
    cases.append(run_advantage("remax/outcome", "remax", mixed, reward_baselines=baselines))
    cases.append(run_advantage("remax/dense_with_holes", "remax", dense, reward_baselines=baselines[:4]))
    cases.append(run_advantage("grpo/dense_with_holes", "grpo", dense, {"norm_adv_by_std_in_grpo": True}))
    cases.append(run_advantage("opo/dense_with_holes", "opo", dense))

    for table, inputs in (("outcome", mixed), ("dense_with_holes", dense)):
        shape = inputs["response_mask"].shape
        steps = torch.arange(shape[0] * shape[1], dtype=torch.float64).reshape(shape)
        old = -((steps * 7) % 11 + 1) / 5
        squares = ((steps * 3) % 8 + 1) / 10
        weights = ((steps * 5) % 9 + 3) / 6
        more = {"old_log_probs": old, "sum_pi_squared": squares}
        more = {key: short(value) for key, value in more.items()}
        weights = short(weights)
        for estimator in ("optimal_token_baseline", "tir_optimal_token_baseline"):
            for tail in (True, False):
                settings = {"handle_zero_tail": tail}
                name = f"{estimator}/{table}/zero_tail_{tail}"
                cases.append(run_advantage(name, estimator, inputs, settings, **more))
            cases.append(
                run_advantage(
                    f"{estimator}/{table}/weights",
                    estimator,
                    inputs,
                    {"handle_zero_tail": True},
                    rollout_is_weights=weights,
                    **more,
                )
            )

    cases.append(run_advantage("gdpo/sum_of_rewards_only", "gdpo", mixed))
    whole = [6, 3, 2, 5, 6, 4, 4, 3]  # GDPO puts each part on the last token: none may be empty
    parts = {
        "accuracy": [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0],
        "format": [0.5, 0.5, 0.0, 0.25, 1.0, 0.0, 0.75, 0.5],
    }
    for label, part_weights, norm in (
        ("equal_weights", None, True),
        ("weights", [2.0, 0.5], True),
        ("no_std", [2.0, 0.5], False),
    ):
        total = [sum(values) for values in zip(*parts.values(), strict=True)]
        inputs = advantage_inputs(total, whole, groups)
        attention = torch.cat([torch.ones(8, 2, dtype=torch.int64), inputs["response_mask"]], dim=1)
        entry = run_advantage(
            f"gdpo/{label}",
            "gdpo",
            inputs,
            {
                "gdpo_reward_keys": list(parts),
                "gdpo_reward_weights": part_weights,
                "norm_adv_by_std_in_grpo": norm,
            },
            dtype="float32",
            non_tensor_batch={key: np.array(value, dtype=object) for key, value in parts.items()},
            batch={"prompts": torch.zeros(8, 2, dtype=torch.int64), "attention_mask": attention},
        )
        entry["inputs"]["reward_parts"] = plain(parts)
        cases.append(entry)
    return golden(
        "verl.trainer.ppo.core_algos.get_adv_estimator_fn",
        cases,
        dtype="see each case's settings",
        registry=list(core_algos.ADV_ESTIMATOR_REGISTRY),
    )


# ---------------------------------------------------------------------------------- kl_in_reward
def record_kl_in_reward():
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    mask = MASK.to(torch.int64)
    scores = torch.zeros(5, 7, dtype=torch.float64)
    for row, (last, reward) in enumerate(zip([6, 3, 6, 6, 5], [1.0, 0.0, 0.5, 0.25, -1.0], strict=True)):
        scores[row, last] = reward
    gaps = {
        "near": REF_GAP / 10,
        "far": REF_GAP.clamp(-3.0, 3.0),
        "same": torch.zeros_like(REF_GAP),
    }
    old = LOG_PROB
    refs = {key: short(old - gap) for key, gap in gaps.items()}
    sequence = ["far", "near", "near", "same", "far", "near"]
    controllers = [
        ("fixed", {"type": "fixed", "kl_coef": 0.05}),
        ("adaptive_short", {"type": "adaptive", "kl_coef": 0.2, "horizon": 25, "target_kl": 0.1}),
        ("adaptive_long", {"type": "adaptive", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1}),
        ("adaptive_in_band", {"type": "adaptive", "kl_coef": 0.1, "horizon": 50, "target_kl": 0.02}),
    ]
    cases = []
    for label, settings in controllers:
        for kind in ("kl", "abs", "mse", "low_var_kl", "k3+"):
            if kind != "kl" and label != "adaptive_short":
                continue
            controller = core_algos.get_kl_controller(KLControlConfig(**settings))
            updates = []
            for which in sequence:
                data = DataProto.from_dict(
                    tensors={
                        "response_mask": mask,
                        "token_level_scores": scores,
                        "old_log_probs": old,
                        "ref_log_prob": refs[which],
                    }
                )
                data, metrics = apply_kl_penalty(data, controller, kl_penalty=kind)
                updates.append(
                    {
                        "reference": which,
                        "token_level_rewards": data.batch["token_level_rewards"],
                        "metrics": metrics,
                        "kl_coef_after": controller.value,
                    }
                )
            cases.append(
                case(
                    f"{label}/{kind}",
                    {
                        "old_log_prob": old,
                        "ref_log_prob": refs,
                        "token_level_scores": scores,
                        "response_mask": mask,
                    },
                    {"kl_ctrl": settings, "kl_penalty": kind, "sequence": sequence},
                    {"updates": updates},
                )
            )
    updates = []
    controller = core_algos.AdaptiveKLController(0.3, 0.5, 100)
    for current_kl, n_steps in ((0.5, 8), (0.55, 8), (0.9, 16), (0.45, 16), (0.0, 64), (1e6, 600)):
        controller.update(current_kl, n_steps)
        updates.append({"current_kl": current_kl, "n_steps": n_steps, "kl_coef_after": controller.value})
    settings = {"kl_ctrl": {"type": "adaptive", "kl_coef": 0.3, "horizon": 100, "target_kl": 0.5}}
    cases.append(case("controller_alone", {}, settings, {"updates": updates}))
    return golden("verl.trainer.ppo.ray_trainer.apply_kl_penalty", cases)


# ---------------------------------------------------------------------------------- rollout_corr
def record_rollout_corr():
    mask = MASK.to(torch.int64)
    old = LOG_PROB.clamp(min=-4.0)
    inputs = {}
    for kind in ("moderate", "wild"):
        # Not wider than +-30: a sum over a row then passes the safety bound of 20 on its own.
        rollout = short(old - LOG_RATIO[kind])
        inputs[kind] = {"old_log_prob": old, "rollout_log_prob": rollout, "response_mask": mask}
    same = {"old_log_prob": old, "rollout_log_prob": old, "response_mask": mask}
    single = {
        "old_log_prob": old[1:2, :1],
        "rollout_log_prob": old[1:2, :1] - 0.3,
        "response_mask": mask[1:2, :1],
    }
    cases = []

    def run(name, tensors, **settings):
        settings = {
            "rollout_is": None,
            "rollout_is_threshold": 2.0,
            "rollout_is_batch_normalize": False,
            "rollout_rs": None,
            "rollout_rs_threshold": None,
            **settings,
        }
        weights, new_mask, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            **{key: value.clone() for key, value in tensors.items()}, **settings
        )
        shown = None if weights is None else weights.batch["rollout_is_weights"]
        outputs = {"rollout_is_weights": shown, "response_mask": new_mask, "metrics": metrics}
        cases.append(case(name, tensors, settings, outputs))

    for kind in ("moderate", "wild"):
        run(f"metrics_only/{kind}", inputs[kind])
        for level in ("token", "sequence"):
            for threshold in (2.0, 1.3, "1.3", "0.8_1.3", "0.5_5.0"):
                for normalize in (False, True):
                    if normalize and threshold in (2.0, "1.3"):
                        continue
                    if (kind, level, threshold) == ("wild", "sequence", "0.8_1.3"):
                        continue  # no row is inside: verl divides by zero in the sample size
                    run(
                        f"weights/{kind}/{level}/{threshold!r}/normalize_{normalize}",
                        inputs[kind],
                        rollout_is=level,
                        rollout_is_threshold=threshold,
                        rollout_is_batch_normalize=normalize,
                    )
    modes = sorted(rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS)
    thresholds = {
        "token_k1": ["0.7_1.3", 1.2],
        "token_k2": [0.03],
        "token_k3": [0.03],
        "seq_sum_k1": ["0.7_1.4", "1.5"],
        "seq_sum_k2": [0.15],
        "seq_sum_k3": [0.15],
        "seq_mean_k1": ["0.95_1.05", 1.02],
        "seq_mean_k2": [0.035],
        "seq_mean_k3": [0.035],
        "seq_max_k2": [0.1],
        "seq_max_k3": [0.1],
    }
    for mode in modes:
        for threshold in thresholds[mode]:
            for kind in ("moderate", "wild"):
                run(
                    f"rejection/{kind}/{mode}/{threshold!r}",
                    inputs[kind],
                    rollout_rs=mode,
                    rollout_rs_threshold=threshold,
                )
    run(
        "rejection/moderate/two_modes",
        inputs["moderate"],
        rollout_rs="token_k1, seq_max_k3,token_k1",
        rollout_rs_threshold="0.7_1.4, 0.09",
    )
    run(
        "rejection/moderate/two_modes_one_threshold",
        inputs["moderate"],
        rollout_rs="token_k2,seq_mean_k2",
        rollout_rs_threshold="0.04",
    )
    run(
        "both/moderate",
        inputs["moderate"],
        rollout_is="token",
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.95_1.05",
    )
    run("both/same_policies", same, rollout_is="sequence", rollout_rs="token_k3", rollout_rs_threshold=0.01)
    run("one_token", single, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=1.2)
    function = "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_rejection_mask"
    return golden(function, cases, modes=modes)


# ---------------------------------------------------------------------------------- distillation
def distillation_config(**settings):
    return DistillationConfig(distillation_loss=DistillationLossConfig(**settings))


def run_distillation(name, inputs, micro_batches, info, agg="token-mean", topk=None, **settings):
    """verl's distillation_ppo_loss of one optimizer step, micro-batch by micro-batch."""
    from verl.trainer.distillation.losses import distillation_ppo_loss

    settings = {
        "loss_mode": "k3",
        "use_task_rewards": False,
        "distillation_loss_coef": 1.0,
        "loss_max_clamp": None,
        "use_policy_gradient": False,
        **settings,
    }
    actor = {"loss_agg_mode": agg, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    micro, collected, total = [], [], 0.0
    for rows in micro_batches:
        part = {key: value[rows] for key, value in inputs.items()}
        data, lengths = engine_batch(part, info, BATCH_NAMES)
        leaf = part["log_prob"].clone().requires_grad_()
        output = {"log_probs": packed(leaf, lengths)}
        extra_leaf = None
        if topk is None:
            teacher = part["teacher_log_prob"].unsqueeze(-1)
            data["teacher_logprobs"] = packed(teacher, lengths)
        else:
            extra_leaf = part["distillation_losses"].clone().requires_grad_()
            output["distillation_losses"] = packed(extra_leaf, lengths)
            for key in ("student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage"):
                if key in part:
                    output[key] = packed(part[key], lengths)
            settings["topk"] = topk
        config = actor_config(loss_scale_factor=info["loss_scale_factor"], **actor)
        loss, metrics = distillation_ppo_loss(config, distillation_config(**settings), output, data)
        loss.backward()
        total += loss.item()
        collected.append(metrics)
        entry = {"rows": rows, "loss": loss, "grad_log_prob": leaf.grad}
        if extra_leaf is not None:
            entry["grad_distillation_losses"] = extra_leaf.grad
        micro.append({**entry, "metrics": shown_metrics(metrics)})
    outputs = {"loss": total, "micro_batches": micro, "step_metrics": step_metrics(collected)}
    shown = {**settings, "actor": actor, "micro_batches": micro_batches, **info}
    return case(name, inputs, shown, outputs)


def record_distillation():
    from verl.trainer.distillation import losses
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

    valid = int(MASK.sum())
    step = {
        "dp_size": 1,
        "batch_num_tokens": valid,
        "global_batch_size": 5,
        "loss_scale_factor": None,
    }
    # verl takes the extremes of an empty selection and fails, so no micro-batch is wholly masked.
    split = [[0, 1], [2, 3, 4]]
    teacher = short(LOG_PROB - REF_GAP)
    near = {**policy_inputs("moderate"), "teacher_log_prob": teacher}
    wild = {**policy_inputs("wild"), "teacher_log_prob": teacher}
    cases = []

    def run(name, inputs, micro=split, info=step, **settings):
        cases.append(run_distillation(name, inputs, micro, info, **settings))

    for mode in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
        if mode != "k1":  # verl refuses k1 here, though not its other name, kl
            run(f"supervised/{mode}", near, loss_mode=mode)
            run(f"supervised/{mode}/clamp_0.5", near, loss_mode=mode, loss_max_clamp=0.5)
        run(f"policy_gradient/{mode}", near, loss_mode=mode, use_policy_gradient=True)
    run("policy_gradient/k1/clamp_0.5", near, loss_mode="k1", use_policy_gradient=True, loss_max_clamp=0.5)
    run("policy_gradient/k1/wild", wild, loss_mode="k1", use_policy_gradient=True, loss_max_clamp=10.0)
    run(
        "policy_gradient/k1/clip",
        near,
        loss_mode="k1",
        use_policy_gradient=True,
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
    )
    for gradient in (False, True):
        kind = "policy_gradient" if gradient else "supervised"
        mode = "k1" if gradient else "k3"
        for coef in (1.0, 0.25):
            run(
                f"task_rewards/{kind}/coef_{coef}",
                near,
                loss_mode=mode,
                use_task_rewards=True,
                use_policy_gradient=gradient,
                distillation_loss_coef=coef,
            )
        run(
            f"coef_without_task_rewards/{kind}",
            near,
            loss_mode=mode,
            use_policy_gradient=gradient,
            distillation_loss_coef=0.25,
        )
        for agg in MODES:
            run(
                f"{kind}/larger_step/{agg}",
                near,
                info=LARGER_STEP,
                loss_mode=mode,
                use_policy_gradient=gradient,
                agg=agg,
            )

    # Top-k forward KL: the per-token part, over a vocabulary of eleven and k = 4.
    tokens, vocab, k = 6, 11, 4
    grid = torch.arange(tokens * vocab, dtype=torch.float64).reshape(1, tokens, vocab)
    logits = short(((grid * 37) % 23 - 11) / 4)
    logits[0, 4] = torch.where(torch.arange(vocab) == 3, 30.0, logits[0, 4])
    teacher_logits = ((grid * 29 + 5) % 19 - 9) / 3
    teacher_logits[0, 0] = logits[0, 0]
    full = teacher_logits.log_softmax(-1)
    top = full.topk(k, dim=-1)
    teacher_top = short(top.values[0])
    for label, settings in (
        ("no_clamp", {"log_prob_min_clamp": None}),
        ("clamp_-10", {"log_prob_min_clamp": -10.0}),
        ("clamp_-3", {"log_prob_min_clamp": -3.0}),
        ("chunked", {"log_prob_min_clamp": None, "use_chunked_topk": True, "chunked_topk_chunk_size": 4}),
    ):
        config = distillation_config(loss_mode="forward_kl_topk", topk=k, use_policy_gradient=False, **settings)
        leaf = logits.clone().requires_grad_()
        offsets = torch.tensor([0, 2, tokens])
        result = compute_forward_kl_topk(
            student_logits=leaf,
            teacher_topk_log_probs=torch.nested.nested_tensor_from_jagged(teacher_top, offsets),
            teacher_topk_ids=torch.nested.nested_tensor_from_jagged(top.indices[0], offsets),
            config=config,
            data_format="thd",
        )
        weights = f64([1.0, -0.5, 2.0, 0.75, 1.5, -1.25])
        (result["distillation_losses"][0] * weights).sum().backward()
        cases.append(
            case(
                f"topk_tokens/{label}",
                {
                    "student_logits": logits[0],
                    "teacher_topk_log_probs": teacher_top,
                    "teacher_topk_ids": top.indices[0],
                    "weights": weights,
                },
                {"loss_mode": "forward_kl_topk", "topk": k, **settings},
                {**{key: value[0] for key, value in result.items()}, "grad_student_logits": leaf.grad[0]},
            )
        )
    # ... and its assembly; some losses are negative, since top-k masses do not sum to one.
    assembled = {
        **policy_inputs("moderate"),
        "distillation_losses": short(REF_GAP.clamp(-3.0, 3.0) * 0.4),
        "student_mass": short(ENTROPY * 0.2 + 0.1),
        "teacher_mass": short(IS_WEIGHTS * 0.2 + 0.3),
        "overlap_count": ((ENTROPY * 10).round() % 5).to(torch.int64),
        "overlap_token_advantage": short(MODERATE * -0.1),
    }
    bare = {key: value for key, value in assembled.items() if not key.startswith("overlap")}
    run("topk_loss", assembled, loss_mode="forward_kl_topk", topk=k)
    run("topk_loss/no_overlap_metrics", bare, loss_mode="forward_kl_topk", topk=k)
    run("topk_loss/clamp_0.3", assembled, loss_mode="forward_kl_topk", topk=k, loss_max_clamp=0.3)
    run(
        "topk_loss/task_rewards",
        assembled,
        loss_mode="forward_kl_topk",
        topk=k,
        use_task_rewards=True,
        distillation_loss_coef=0.5,
    )
    run("topk_loss/policy_gradient", assembled, loss_mode="forward_kl_topk", topk=k, use_policy_gradient=True)
    return golden(
        "verl.trainer.distillation.losses.distillation_ppo_loss",
        cases,
        dtype="float64; the values of topk_tokens are float32",
        registry=list(losses.DISTILLATION_LOSS_REGISTRY),
    )


# --------------------------------------------------------------------------------- dapo_overlong
class _Tokenizer:
    """Decodes anything to nothing: the overlong part looks only at the length."""

    def decode(self, *args, **kwargs):
        return ""


def record_dapo_overlong():
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    cases = []
    for max_resp_len, buffer_len, factor in ((20, 4, 1.0), (20, 20, 1.0), (32, 8, 0.5), (16, 3, 2.0)):
        buffer = {"enable": True, "len": buffer_len, "penalty_factor": factor, "log": True}
        kwargs = {"overlong_buffer_cfg": buffer, "max_resp_len": max_resp_len}
        config = OmegaConf.create({"reward": {"reward_kwargs": kwargs}})
        for score in (1.0, 0.0):
            manager = DAPORewardManager(config, _Tokenizer(), lambda score=score, **_: score)
            lengths = list(range(max_resp_len + 3))  # verl does not stop at the maximum either
            rewards, penalties, flags = [], [], []
            width = max(lengths)
            for length in lengths:
                attention = torch.zeros(1, width + 1, dtype=torch.int64)
                attention[0, : length + 1] = 1
                data = DataProto.from_dict(
                    tensors={
                        "responses": torch.zeros(1, width, dtype=torch.int64),
                        "attention_mask": attention,
                    },
                    non_tensors={
                        "data_source": np.array(["none"], dtype=object),
                        "reward_model": np.array([{"ground_truth": ""}], dtype=object),
                    },
                )
                result = manager.loop.run_until_complete(manager.run_single(data))
                rewards.append(float(result["reward_score"]))
                penalties.append(float(result["reward_extra_info"]["overlong_reward"]))
                flags.append(bool(result["reward_extra_info"]["overlong"]))
            cases.append(
                case(
                    f"max_{max_resp_len}/buffer_{buffer_len}/factor_{factor}/score_{score}",
                    {"lengths": lengths, "score": score},
                    {"max_resp_len": max_resp_len, **{k: buffer[k] for k in ("len", "penalty_factor")}},
                    {"reward": rewards, "overlong_reward": penalties, "overlong": flags},
                )
            )
    function = "verl.experimental.reward_loop.reward_manager.dapo.DAPORewardManager.run_single"
    return golden(function, cases, dtype="float32")


RECORDERS = {
    "kl_penalty": record_kl_penalty,
    "agg_loss": record_agg_loss,
    "policy_loss": record_policy_loss,
    "ppo_loss": record_ppo_loss,
    "advantages": record_advantages,
    "kl_in_reward": record_kl_in_reward,
    "rollout_corr": record_rollout_corr,
    "distillation": record_distillation,
    "dapo_overlong": record_dapo_overlong,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECORDERS)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or RECORDERS:
        torch.manual_seed(0)
        recorded = RECORDERS[name]()
        text = dump(plain(recorded)) + "\n"
        (arguments.out / f"{name}.json").write_text(text)
        print(f"{name}: {len(recorded['cases'])} cases, {len(text)} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
