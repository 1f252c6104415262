"""`GRPOVerlConfig`: TRL's training arguments with verl's objective keys."""

import dataclasses
import math
import os
from dataclasses import dataclass, field

import torch
from trl import GRPOConfig

from ..objective import KL_PENALTIES, LOSS_AGG_MODES, POLICY_LOSSES, ObjectiveConfig
from .forward import LAYOUTS

OBJECTIVE_FIELDS = tuple(f.name for f in dataclasses.fields(ObjectiveConfig))


@dataclass
class GRPOVerlConfig(GRPOConfig):
    """[`trl.GRPOConfig`] for [`GRPOVerlTrainer`]: the objective's settings carry verl's names and defaults.

    Every TRL setting carries on, except those that name a quantity of the objective by another name (`epsilon`, `beta`,
    `loss_type`, ...): they are refused with the name to use instead, unless they agree with it. All checks run when the
    config is made, before any model is loaded.

    Raises:
        ValueError: names the setting, its value and the remedy.
    """

    policy_loss: str = field(
        default=ObjectiveConfig.policy_loss,
        metadata={
            "help": "Policy loss by name (verl: policy_loss.loss_mode): 'vanilla' is PPO's clipped loss with "
            "Clip-Higher and dual-clip; `register_policy_loss` adds names."
        },
    )
    clip_ratio: float = field(
        default=ObjectiveConfig.clip_ratio,
        metadata={"help": "Epsilon of the ratio's clip [1-epsilon, 1+epsilon], where the next two are None."},
    )
    clip_ratio_low: float | None = field(
        default=ObjectiveConfig.clip_ratio_low, metadata={"help": "Lower epsilon. None: clip_ratio."}
    )
    clip_ratio_high: float | None = field(
        default=ObjectiveConfig.clip_ratio_high,
        metadata={"help": "Upper epsilon (Clip-Higher; DAPO and DeepSeek-V3 use 0.28). None: clip_ratio."},
    )
    clip_ratio_c: float = field(
        default=ObjectiveConfig.clip_ratio_c,
        metadata={"help": "Dual-clip bound c > 1: where the advantage A is negative, a token's loss is at most -A*c."},
    )
    loss_agg_mode: str = field(
        default=ObjectiveConfig.loss_agg_mode,
        metadata={
            "help": "How per-token losses become one number, with counts over the optimizer step: "
            + ", ".join(LOSS_AGG_MODES)
            + "."
        },
    )
    loss_scale_factor: float | None = field(
        default=ObjectiveConfig.loss_scale_factor,
        metadata={"help": "Constant of 'seq-mean-token-sum-norm', in tokens. None: max_completion_length."},
    )
    entropy_coeff: float = field(
        default=ObjectiveConfig.entropy_coeff, metadata={"help": "Weight of the entropy bonus. 0: no bonus."}
    )
    use_kl_loss: bool = field(
        default=ObjectiveConfig.use_kl_loss,
        metadata={"help": "Whether the loss has a KL term towards the frozen reference model."},
    )
    kl_loss_coef: float = field(
        default=ObjectiveConfig.kl_loss_coef, metadata={"help": "Weight of the KL term, with use_kl_loss."}
    )
    kl_loss_type: str = field(
        default=ObjectiveConfig.kl_loss_type,
        metadata={"help": "KL estimator, with use_kl_loss: " + ", ".join(KL_PENALTIES) + "."},
    )
    norm_adv_by_std_in_grpo: bool = field(
        default=True,
        metadata={"help": "Whether advantages are divided by their group's standard deviation. False: Dr.GRPO."},
    )
    shuffle_mini_batches: bool = field(
        default=False,
        metadata={
            "help": "Whether the rows of a generation batch are shuffled before they are split into optimizer steps, "
            "as TRL does. False keeps verl's order: the responses to a prompt stay together."
        },
    )

    forward_layout: str = field(
        default="auto",
        metadata={
            "help": "How rows go through the model: 'packed' end to end (verl: use_remove_padding), for attention with "
            "row boundaries; 'grouped' with rows of similar length; 'padded' as TRL does; 'auto' chooses by the "
            "model's attention."
        },
    )
    max_tokens_per_forward: int | None = field(
        default=None,
        metadata={
            "help": "Bound on the tokens of one forward, padding included (verl: ppo_max_token_len_per_gpu). A longer "
            "single row still is one. None: per_device_train_batch_size rows as long as the longest."
        },
    )
    calculate_entropy: bool = field(
        default=True,
        metadata={
            "help": "Whether the entropy is logged when entropy_coeff is 0. False lets rows with advantage 0 skip "
            "their forward too."
        },
    )
    max_nonfinite_steps: int = field(
        default=3,
        metadata={
            "help": "A step whose gradient is NaN or infinite is skipped and counted; so many in a row end the run."
        },
    )

    # README, departure 12. With dropout the ratio differs from 1 before any update; verl runs without it.
    disable_dropout: bool = field(
        default=True,
        metadata={
            "help": "Whether dropout is off in the policy and the reference. True, unlike TRL: with dropout on, old "
            "and new log-probabilities differ before any update."
        },
    )
    # README, departure 11. True, TRL's default, multiplies the KL term by the ratio; verl does not. Refused below.
    use_bias_correction_kl: bool = field(
        default=False,
        metadata={"help": "Not available: it multiplies the KL term by the ratio, which verl does not. Leave False."},
    )

    def __post_init__(self):
        self._refuse_wrong_types()
        objective = self.objective_config()
        self._refuse_other_names(objective)
        self._refuse_indivisible_batches()
        if self.bf16 is None and (self.use_cpu or not torch.accelerator.is_available()):
            self.bf16 = False  # TRL's default, True, needs an accelerator
        if self.forward_layout not in LAYOUTS:
            raise ValueError(f"forward_layout={self.forward_layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
        # TRL 1.16 sets these by names that transformers 5.24 has given up, and each run would warn of it
        for name in ("checkpointing", "checkpointing_kwargs"):
            if getattr(self, f"activation_{name}") is None:
                setattr(self, f"activation_{name}", getattr(self, f"gradient_{name}"))
        super().__post_init__()
        if self.deepspeed_plugin is not None:
            # Left out of a DeepSpeed config, clipping is 1.0 there, whatever max_grad_norm says
            deepspeed = self.deepspeed_plugin.hf_ds_config.config
            deepspeed.setdefault("gradient_clipping", self.max_grad_norm)
            if deepspeed.get("bf16", {}).get("check_grad_overflow") is False:
                raise ValueError(
                    "DeepSpeed's bf16.check_grad_overflow=False lets it take steps whose gradient is NaN or infinite; "
                    "leave it out, or set it to true"
                )
        self._refuse_windows_across_generations()

    def _refuse_wrong_types(self) -> None:
        """Refuse counts that are not whole numbers from 1, and switches that are not booleans."""
        for name in ("norm_adv_by_std_in_grpo", "shuffle_mini_batches", "calculate_entropy", "disable_dropout"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        optional = ("steps_per_generation", "generation_batch_size", "num_generations_eval", "max_tokens_per_forward")
        counts = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations")
        for name in (*counts, "max_nonfinite_steps", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        for weight in self.reward_weights or ():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ValueError(f"reward_weights={self.reward_weights!r} must be finite numbers")
        # Both are set in a config that is copied, or read back from its own record
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if self.steps_per_generation is not None and self.generation_batch_size == (
            self.per_device_train_batch_size * ranks * self.steps_per_generation
        ):
            self.generation_batch_size = None

    def objective_config(self) -> ObjectiveConfig:
        """The settings of `ppo_loss`, with `loss_scale_factor=None` resolved to `max_completion_length` tokens."""
        settings = {name: getattr(self, name) for name in OBJECTIVE_FIELDS}
        # README, departure 3
        if settings["loss_agg_mode"] == "seq-mean-token-sum-norm" and settings["loss_scale_factor"] is None:
            settings["loss_scale_factor"] = self.max_completion_length
        return ObjectiveConfig(**settings)

    def _refuse_other_names(self, objective: ObjectiveConfig) -> None:
        """Refuse each TRL name of a quantity that has another name here, unless both agree."""
        for name, value, agrees, remedy in self._other_names(objective):
            if not agrees:
                raise ValueError(f"{name}={value!r} is TRL's setting and would have no effect here: {remedy}")

    def _other_names(self, objective: ObjectiveConfig):
        """Yield (TRL's name, its value, whether it says what is in force anyway, remedy); the table is this method."""
        default = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}

        def row(name: str, remedy: str, *in_force):
            value = getattr(self, name)
            # 0 equals False, and "False" from a command line is a string: compare as TRL will read it
            return name, value, value in (default[name], *in_force), remedy

        kl_coef = objective.kl_loss_coef if objective.use_kl_loss else 0.0
        yield row("epsilon", f"set clip_ratio_low={self.epsilon!r} (now {objective.clip_low})", objective.clip_low)
        yield row(
            "epsilon_high",
            f"set clip_ratio_high={self.epsilon_high!r} (now {objective.clip_high})",
            objective.clip_high,
        )
        yield row(
            "delta",
            f"set clip_ratio_c={self.delta!r} (now {objective.clip_ratio_c}), the bound where the advantage is "
            f"negative; the two are equal when it exceeds 1 + clip_ratio_high",
            objective.clip_ratio_c,
        )
        yield row("beta", f"set use_kl_loss=True and kl_loss_coef={self.beta!r} (in force now: {kl_coef})", kl_coef)
        yield row(
            "loss_type",
            {
                "grpo": "set loss_agg_mode='seq-mean-token-mean' instead",
                "bnpo": "set loss_agg_mode='token-mean' instead",
                "dr_grpo": "set loss_agg_mode='seq-mean-token-sum-norm' and norm_adv_by_std_in_grpo=False instead",
            }.get(self.loss_type, f"choose policy_loss among {', '.join(POLICY_LOSSES)}, and loss_agg_mode"),
        )
        scale_rewards = {True: "group", False: "none", "True": "group", "False": "none"}.get(
            self.scale_rewards, self.scale_rewards
        )
        in_force = "group" if self.norm_adv_by_std_in_grpo else "none"
        yield (
            "scale_rewards",
            self.scale_rewards,
            scale_rewards in ("group", in_force),
            "set norm_adv_by_std_in_grpo=False to leave the division by the group's std out"
            if scale_rewards == "none"
            else "advantages are normalised per group; set norm_adv_by_std_in_grpo",
        )
        yield row(
            "multi_objective_aggregation",
            "the weighted sum of the rewards is normalised per group; leave 'sum_then_normalize'",
        )
        yield row("entropy_coef", f"set entropy_coeff={self.entropy_coef!r}", objective.entropy_coeff)
        adaptive = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
        for name in ("use_adaptive_entropy", *adaptive):
            yield row(name, "the entropy bonus has a fixed weight, entropy_coeff")
        yield row("top_entropy_quantile", "every token with response_mask 1 is trained on; leave 1.0")
        yield row("off_policy_mask_threshold", "leave None; mask or weight rows through a reward or a policy loss")
        yield row(
            "importance_sampling_level",
            "the policy loss decides the ratio's level; 'vanilla' has token ratios. Register a sequence-level policy "
            "loss with register_policy_loss and leave 'token'",
        )
        value = self.use_bias_correction_kl
        yield (
            "use_bias_correction_kl",
            value,
            not value,
            "leave False; for a KL gradient without bias set kl_loss_type='low_var_kl+' or 'k2'",
        )
        for name in ("sapo_temperature_neg", "sapo_temperature_pos"):
            yield row(name, f"it belongs to loss_type='sapo'; choose policy_loss among {', '.join(POLICY_LOSSES)}")
        for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
            yield row(name, f"it belongs to loss_type='vespo'; choose policy_loss among {', '.join(POLICY_LOSSES)}")

    def _refuse_indivisible_batches(self) -> None:
        """Refuse batch sizes that do not divide, with the numbers that would; before TRL, which names none."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        rows = self.per_device_train_batch_size * ranks
        generations = self.num_generations
        if generations is None or generations < 2:
            raise ValueError(
                f"num_generations={generations!r} must be at least 2: a response is scored against the others of its "
                f"group"
            )
        whole = self._steps_of_whole_groups() * rows
        if self.generation_batch_size is not None and self.generation_batch_size % rows:
            below = self.generation_batch_size // whole * whole
            raise ValueError(
                f"generation_batch_size={self.generation_batch_size} must be a multiple of "
                f"per_device_train_batch_size x ranks = {self.per_device_train_batch_size} x {ranks} = {rows}; use "
                f"{' or '.join(str(n) for n in (below, below + whole) if n)}"
            )
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        batch = self.generation_batch_size or rows * steps
        if batch % generations:
            divisors = [n for n in range(2, batch + 1) if batch % n == 0]
            fitting = -(-batch // whole) * whole
            raise ValueError(
                f"the generation batch of {batch} responses (per_device_train_batch_size "
                f"{self.per_device_train_batch_size} x ranks {ranks} x steps_per_generation {batch // rows}) must be a "
                f"multiple of num_generations={generations}; use num_generations among {divisors}, or a batch of "
                f"{fitting} (steps_per_generation={fitting // rows})"
            )

    def _steps_of_whole_groups(self) -> int:
        """The least number of micro-batches that make whole optimizer steps and hold whole groups."""
        rows = self.per_device_train_batch_size * int(os.environ.get("WORLD_SIZE", "1"))
        groups = self.num_generations // math.gcd(rows, self.num_generations)
        return math.lcm(self.gradient_accumulation_steps, groups)

    def _refuse_windows_across_generations(self) -> None:
        """Refuse optimizer steps that span generations: their counts are unknown at their first backward."""
        accumulation, steps = self.gradient_accumulation_steps, self.steps_per_generation
        if steps % accumulation:
            whole = self._steps_of_whole_groups()
            multiple = -(-steps // whole) * whole
            raise ValueError(
                f"steps_per_generation={steps} must be a multiple of gradient_accumulation_steps={accumulation}, so "
                f"that each optimizer step has all its responses before its first backward; use "
                f"steps_per_generation={multiple}, or gradient_accumulation_steps among "
                f"{[n for n in range(1, steps + 1) if steps % n == 0]}"
            )
