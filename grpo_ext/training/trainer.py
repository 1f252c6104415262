"""`GRPOVerlTrainer`: TRL's GRPO trainer with verl's objective."""

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import (
    get_config_model_id,
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    unsplit_pixel_values_by_grid,
)

from ..objective import Metric, ppo_loss, step_function, traits
from ..objective.metrics import mean_metric
from . import preflight
from .adapters import complete_reference, require_one_adapter, saved_adapters_train
from .callbacks import ActorMetricsCallback, forward_metrics
from .checkpoints import (
    last_usable,
    make_room,
    read_marker,
    read_rank_state,
    remove_older,
    write_marker,
    write_rank_state,
)
from .config import GRPOVerlConfig
from .correction import RolloutCorrector, require_sampler
from .diagnosis import DiagnosisCallback
from .distillation import TOPK_IDS, Distiller
from .dynamic_sampling import DynamicSampler, PromptStream, require_text
from .forward import Rows, Scores, choose_layout, row_lengths, score
from .greedy_baseline import greedy_rewards, require_own_sampling
from .layout import CostModel, RowLength, packed_groups, padded_groups
from .nonfinite import NonFiniteSteps, nonfinite_counts
from .plan import print_preflight
from .reference import frozen_copy, reference_is
from .rewards import checked_reward
from .rollouts import checked_rollout
from .scoring import Sampled, Scorer
from .topk_head import score_topk
from .whole_step import over_whole_step
from .windows import Batch, EpochSampler, ForwardPlan, Rollout, Splitter, equally_many, response_mask

logger = logging.getLogger(__name__)

# What TRL's forward takes beside tokens and masks, for models with images.
_MULTIMODAL_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class GRPOVerlTrainer(GRPOTrainer):
    """[`trl.GRPOTrainer`] whose loss and advantages are verl's, however the batch is split.

    The constructor is TRL's; `args` is a [`GRPOVerlConfig`]. The gradient of an optimizer step equals the gradient of
    [`grpo_ext.ppo_loss`] on all its rows as one tensor on one device, for any split into micro-batches and ranks.

    Raises:
        TypeError: `args` is not a `GRPOVerlConfig`.
        ValueError: the dataset, the output folder or the adapter cannot work; before a model is loaded where possible.

    Example:

    ```python
    trainer = GRPOVerlTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=reward,
        args=GRPOVerlConfig("out", clip_ratio_high=0.28),
        train_dataset=dataset,
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "grpo", "grpo_ext"]

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: GRPOVerlConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = GRPOVerlConfig(f"{name.split('/')[-1]}-GRPO")
        if not isinstance(args, GRPOVerlConfig):
            raise TypeError(
                f"args is a {type(args).__name__}; GRPOVerlTrainer takes a GRPOVerlConfig, which has TRL's settings "
                f"and verl's objective keys"
            )
        self._check(args, model, train_dataset, eval_dataset, environment_factory)
        require_one_adapter(model, peft_config)
        require_own_sampling(args, rollout_func, environment_factory)
        require_sampler(args, rollout_func)

        reference = None
        if args.needs_reference and isinstance(model, PreTrainedModel) and peft_config is None:
            reference = frozen_copy(model)
        # TRL sets a reference up if `beta` is not 0, and only its own loss reads the value.
        beta, args.beta = args.beta, float(args.needs_reference)
        try:
            with reference_is(reference), saved_adapters_train():
                super().__init__(
                    model=model,
                    reward_funcs=reward_funcs,
                    args=args,
                    train_dataset=train_dataset,
                    eval_dataset=eval_dataset,
                    processing_class=processing_class,
                    reward_processing_classes=reward_processing_classes,
                    callbacks=callbacks,
                    optimizers=optimizers,
                    quantization_config=quantization_config,
                    peft_config=peft_config,
                    tools=tools,
                    rollout_func=rollout_func,
                    environment_factory=environment_factory,
                )
        finally:
            args.beta = beta
        complete_reference(self.model)
        preflight.require_trainable(self.model)

        self.objective_config = args.objective_config()
        self.reward_funcs = [
            checked_reward(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        self.rollout_func = checked_rollout(self.rollout_func)
        self._rollout: Rollout | None = None
        self._rewarded: tuple[Tensor, list[int]] | None = None  # of what TRL is sampling: rewards, lengths
        self._scorer = Scorer(args, self.reward_weights, self.accelerator)
        self._dynamic_sampler = self._make_dynamic_sampler() if args.filter_groups else None
        self._nonfinite = NonFiniteSteps(args.max_nonfinite_steps)
        self._actor_metrics = ActorMetricsCallback(self, self._nonfinite)
        self.add_callback(self._actor_metrics)
        if args.diagnosis:
            self.add_callback(DiagnosisCallback(args.diagnosis_config()))
        self._train_sampler: EpochSampler | None = None
        self._epoch, self._epoch_start = 0, 0  # the latter counts micro-batches, as `_step` does
        self._resumed_at: tuple[int, int] | None = None  # epoch, micro-batches of it
        base_model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        self._layout, reason = choose_layout(args.forward_layout, self.model, images=self._is_vlm)
        if reason is not None:
            logger.warning("forward_layout is %r: %s", self._layout, reason)
        if args.pad_to_multiple_of is not None and self._layout != "padded":
            logger.warning(
                "pad_to_multiple_of=%s pads prompts for sampling only: the update runs without padding; set "
                "forward_layout='padded' to pad there too",
                args.pad_to_multiple_of,
            )
        self._cost = CostModel.of(base_model.config, self.accelerator.device.type)
        self._corrector = RolloutCorrector(self.objective_config, self.accelerator)
        self._distiller: Distiller | None = None
        if args.teacher_model is not None:
            self._distiller = Distiller(args, self.accelerator, self._tokenizer, self.model, self._layout)
        self._settle_dropout()

    @staticmethod
    def _check(args, model, train_dataset, eval_dataset, environment_factory) -> None:
        """Everything that can be refused without a model."""
        preflight.require_writable(args.output_dir)
        if environment_factory is None and train_dataset is not None:
            preflight.require_prompts(train_dataset, "train_dataset")
        for name, dataset in (eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}).items():
            if dataset is not None and environment_factory is None:
                preflight.require_prompts(dataset, f"eval_dataset {name}".strip())
        if train_dataset is not None:
            preflight.require_full_batches(train_dataset, args)
            require_text(train_dataset, args)
        if isinstance(model, PeftModel):
            preflight.require_trainable(model)
            preflight.require_single_trained_adapter(model)

    def _settle_dropout(self) -> None:
        """Turn off what TRL's `disable_dropout` leaves on, or say that dropout is on."""
        active = []
        for model in filter(None, (self.model, self.ref_model)):
            for name, module in model.named_modules():
                # Attention modules keep their rate as a plain attribute and pass it to a function
                rate = getattr(module, "attention_dropout", 0.0)
                if isinstance(module, nn.Dropout):
                    rate = module.p
                elif self.args.disable_dropout and isinstance(rate, float):
                    module.attention_dropout = rate = 0.0
                if isinstance(rate, float) and rate > 0:
                    active.append(name)
        if active:
            logger.warning(
                "dropout is on in %d modules (first: %s): old and new log-probabilities differ before any update, so "
                "the ratio is no longer 1 there; set disable_dropout=True to compare like with like",
                len(active),
                active[0],
            )

    # Rollout: TRL generates and scores; the advantages and the order of the rows are verl's

    def _tokenize_prompts(self, prompts: list) -> tuple:
        tokenized = super()._tokenize_prompts(prompts)
        for prompt, ids in zip(prompts, tokenized[0], strict=True):
            if not len(ids):
                raise ValueError(
                    f"the prompt {prompt!r} has no tokens, so there is nothing to continue; remove it from the data set"
                )
        return tokenized

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        # (N, functions), of all ranks
        for name, infinite in zip(self.reward_func_names, rewards.isinf().any(0).tolist(), strict=True):
            if infinite:  # functions are checked one by one; this is a reward model
                raise ValueError(f"reward {name!r} is infinite at step {self.state.global_step}; it must be finite")
        self._rewarded = rewards, [len(ids) for ids in completion_ids_list]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        train, metrics = self.model.training, {}
        if train and self._dynamic_sampler is not None:
            sampled, metrics = self._dynamic_sampler.fill(inputs, self._sample, self._logs)
        else:
            sampled = self._sample(inputs)
        batch = sampled.batch
        old_log_probs = functools.cache(lambda: self._old_log_probs(batch))
        outcomes = self._scorer.outcomes(sampled, old_log_probs, train=train)
        metrics |= outcomes.metrics
        if train:  # after the rewards and before the advantages, which see what is left (verl's order)
            self._correct_rollout(batch, old_log_probs)
        group, baselines = self.num_generations if train else self.num_generations_eval, None
        if self._scorer.needs_baseline:
            greedy = self._scorer.baselines(*greedy_rewards(self, batch["inputs"], group))
            metrics[f"{self.args.adv_estimator}/baseline_reward"] = greedy.nanmean().item()
            baselines, self._rewarded = greedy.repeat_interleave(group), None
        batch["advantages"], of_rows = self._scorer.advantages(sampled, outcomes, group, baselines)
        self._correct_logged_advantages(of_rows)
        self._actor_metrics.record("train" if train else "eval", metrics)
        spent = ["completion_lengths", "inputs", *([] if self.args.use_kl_loss else ["ref_per_token_logps"])]
        return {name: value for name, value in batch.items() if name not in spent}

    def _sample(self, inputs: list[dict[str, Any]]) -> Sampled:
        """Completions and rewards of this rank's rows, by TRL; its advantages are not used."""
        batch = super()._generate_and_score_completions(inputs)
        (rewards, lengths), self._rewarded = self._rewarded, None
        batch["completion_lengths"] = torch.tensor(lengths, device=rewards.device)
        if self._scorer.needs_baseline:
            batch["inputs"] = inputs
        return Sampled(batch, rewards)

    def _make_dynamic_sampler(self) -> DynamicSampler:
        columns = None
        if self.args.remove_unused_columns:  # as the data loader does
            self._set_signature_columns_if_needed()
            columns = self._signature_columns
        stream = PromptStream(self.train_dataset, self.args.seed, columns)
        return DynamicSampler(self.args, stream, self._scorer.total, self.reward_func_names, self.accelerator)

    def _correct_logged_advantages(self, advantages: Tensor) -> None:
        """Replace TRL's advantages, the last entries of the completions table, by the ones in force."""
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), advantages.numel())):
            logged.pop()
        logged.extend(advantages.tolist())

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """One micro-batch, in training with the counts of its optimizer step and the plan of its forwards."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        steps = self.args.steps_per_generation
        if self._rollout is None or self._step % self._cycle == 0:
            with self._actor_metrics.clock.excluding():
                batch = self._generate_and_score_completions(generation_batch)
                if self._distiller is not None:
                    self._distiller.score(batch)
            if self.args.shuffle_mini_batches:
                batch = unsplit_pixel_values_by_grid(shuffle_sequence_dict(split_pixel_values_by_grid(batch)))
            self._rollout = self._splitter().split(batch, self.accelerator)
        index, accumulation = self._step % steps, self.args.gradient_accumulation_steps
        if index % accumulation == 0:
            self._look_at_whole_step(index, index + self.current_gradient_accumulation_steps)
        return self._rollout.micro_batch(index, accumulation, self.current_gradient_accumulation_steps)

    def _correct_rollout(self, batch: Batch, old_log_probs: Callable[[], Tensor]) -> None:
        """Weights and rejection of rows that another policy, or another implementation, sampled."""
        if not self._corrector.active:
            return
        for name, value in self._corrector.apply(batch, old_log_probs).items():
            self._metrics["train"][name].append(value)

    @torch.no_grad()
    def _old_log_probs(self, batch: Batch) -> Tensor:
        """`(B, T)`, nats, of the policy as it is now, where TRL saw no need for them."""
        return self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=self.args.per_device_train_batch_size,
            **{key: batch[key] for key in _MULTIMODAL_KEYS if key in batch},
        )[0]

    def _look_at_whole_step(self, start: int, end: int) -> None:
        """Give a policy loss that looks at the whole optimizer step what it needs, before the step's first backward."""
        function = step_function(self.objective_config)
        if function is None:
            return
        window = self._rollout.micro_batches[start:end]
        with torch.no_grad():
            log_probs = [
                self._forward(self.model, {**micro, "plan": plan}).log_probs
                for micro, plan in zip(window, self._rollout.plans[start:end], strict=True)
            ]
        seed = self.args.seed * 1_000_003 + self.state.global_step  # so that a resumed run draws alike
        over_whole_step(function, window, log_probs, self.objective_config, seed, self.accelerator)

    def _splitter(self) -> Splitter:
        objective = self.objective_config
        other_terms = objective.use_kl_loss or objective.entropy_coeff != 0 or self.aux_loss_enabled
        other_terms = other_terms or self._distiller is not None
        off_policy = self._cycle != self.args.gradient_accumulation_steps or self.use_vllm
        return Splitter(
            steps_per_generation=self.args.steps_per_generation,
            accumulation=self.args.gradient_accumulation_steps,
            cost=self._cost,
            group=None if self._layout == "padded" else self._train_groups,
            spare_zero_advantages=not other_terms and traits(objective.policy_loss).proportional_to_advantage,
            observe_spared=self.args.calculate_entropy or off_policy or objective.policy_loss != "vanilla",
        )

    @property
    def _cycle(self) -> int:
        """Micro-batches from one generation to the next."""
        return self.args.steps_per_generation * self.num_iterations

    # Update

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This micro-batch's share of the optimizer step's loss: forward, counts, objective, record.

        Raises:
            ValueError: `return_outputs` is set; there are no outputs to return.
        """
        if return_outputs:
            raise ValueError("return_outputs=True is not supported: the loss is computed without logits")
        scores = self._forward(model, inputs)
        log_prob, entropy, aux_loss = scores[:3]
        mask, old_log_prob = response_mask(inputs), inputs.get("old_per_token_logps")
        objective, teacher = ppo_loss, {}
        if self._distiller is not None and self.model.training:  # an evaluation has no teacher
            objective, teacher = self._distiller.loss, self._distiller.terms(inputs, scores)
        loss, metrics = objective(
            log_prob,
            log_prob.detach() if old_log_prob is None else old_log_prob,
            inputs["advantages"],
            mask,
            config=self.objective_config,
            batch_info=inputs.get("batch_info"),
            entropy=entropy if self.objective_config.entropy_coeff != 0 else None,
            ref_log_prob=inputs.get("ref_per_token_logps"),
            rollout_is_weights=inputs.get("importance_sampling_ratio"),
            of_step=inputs.get("of_step"),
            **teacher,
        )
        # README, departure 10. The gradient of a clamp at NaN is 0: a NaN reference would pass for a finite gradient
        counted = torch.where(mask.bool(), log_prob, 0.0)
        loss = loss + 0.0 * loss.detach() * counted.sum()
        if self.args.calculate_entropy or self.objective_config.entropy_coeff != 0:
            metrics["entropy"] = mean_metric(entropy, mask)
        if self.model.training:
            metrics |= self._nonfinite_counts(inputs, mask, log_prob, entropy)
            attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            metrics |= forward_metrics(inputs.get("plan"), attention_mask, packed=self._layout == "packed")
        if aux_loss is not None:
            # A property of the micro-batch's routing and not a sum over its tokens: averaged over micro-batches
            windows = self.current_gradient_accumulation_steps if self.model.training else 1
            loss = loss + self.router_aux_loss_coef * aux_loss / windows
            metrics["aux_loss"] = Metric(aux_loss.detach(), 1)
        self._actor_metrics.sums["train" if self.model.training else "eval"].add(metrics)
        return loss

    def _forward(self, model: nn.Module, inputs: Batch) -> Scores:
        """Log-probabilities and entropies `(B, T)` of the completions, nats, and the MoE auxiliary loss."""
        completions = inputs["completion_ids"]
        input_ids = torch.cat([inputs["prompt_ids"], completions], dim=1)
        plan: ForwardPlan | None = inputs.get("plan")
        if plan is None:
            attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            return Scores(
                *self._get_per_token_logps_and_entropies(
                    model,
                    input_ids,
                    attention_mask,
                    completions.size(1),
                    compute_entropy=True,
                    compute_aux_loss=self.aux_loss_enabled,
                    **{key: inputs[key] for key in _MULTIMODAL_KEYS if key in inputs},
                )
            )
        rows = Rows(input_ids, completions.size(1), plan.lengths)
        packed = self._layout == "packed"
        with self.accelerator.autocast():
            known = {"packed": packed, "entropy": True, "aux_loss": self.aux_loss_enabled}
            if TOPK_IDS in inputs:
                scores, topk = score_topk(model, rows, plan.train, inputs[TOPK_IDS], **known)
                scores = scores._replace(topk=topk)
            else:
                scores = score(model, rows, plan.train, **known)
            if plan.observe:
                with torch.no_grad():
                    observed = score(model, rows, plan.observe, packed=packed, entropy=True)
                # Each row is in one of the two, and 0 in the other
                scores = Scores(
                    scores.log_probs + observed.log_probs, scores.entropies + observed.entropies, scores.aux_loss
                )
        return scores

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **multimodal,
    ):
        """TRL's, without padding: the passes of the old policy and of the reference, and evaluation."""
        if self._layout == "padded":
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **multimodal,
            )
        lengths = row_lengths(attention_mask, logits_to_keep)
        groups = equally_many(self._groups(lengths, batch_size), self.accelerator)
        with self.accelerator.autocast():
            scores = score(
                model,
                Rows(input_ids, logits_to_keep, lengths),
                groups,
                packed=self._layout == "packed",
                entropy=compute_entropy,
                aux_loss=compute_aux_loss,
            )
        return scores.log_probs, scores.entropies, scores.aux_loss

    def _train_groups(self, lengths: list[RowLength]) -> list[list[int]]:
        return self._groups(lengths, self.args.per_device_train_batch_size)

    def _groups(self, lengths: list[RowLength], rows_at_a_time: int | None = None) -> list[list[int]]:
        """Rows that share a forward, within the token budget."""
        budget = self.args.max_tokens_per_forward
        if budget is None and rows_at_a_time is not None:
            budget = rows_at_a_time * max((n.total for n in lengths), default=0)
        if self._layout == "packed":
            return packed_groups(lengths, budget)
        return padded_groups(lengths, self._cost, budget)

    @staticmethod
    def _nonfinite_counts(inputs: Batch, mask: Tensor, log_prob: Tensor, entropy: Tensor) -> dict[str, Metric]:
        old, reference = inputs.get("old_per_token_logps"), inputs.get("ref_per_token_logps")
        return nonfinite_counts(
            mask,
            {
                "advantage": inputs["advantages"].view(len(log_prob), -1),
                "log-prob": log_prob,
                "log-ratio": None if old is None else log_prob - old,
                "reference log-ratio (KL)": None if reference is None else log_prob - reference,
                "entropy": entropy,
            },
        )

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """TRL's, and the place where a step with a gradient that is not finite is skipped, as verl does.

        DeepSpeed has skipped it already; with float16 a loss scaler (DeepSpeed has its own) expects such steps and
        skips them itself.
        """
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scaled = self.accelerator.mixed_precision == "fp16"
        if not scaled and grad_norm is not None and not math.isfinite(float(grad_norm)):
            self._nonfinite.drop_gradient(model)
        return grad_norm

    # Checkpoints: a run that is killed and resumed is the run that was not

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """TRL's; a resumed run gives the same prompts, completions and parameters as an uninterrupted one.

        Args:
            resume_from_checkpoint: a checkpoint's path, or `True` for the last complete one in `output_dir`.
            kwargs: as `transformers.Trainer.train` takes them.

        Raises:
            ValueError: the checkpoint was cut short, was written with another number of ranks, or lies inside a
                generation cycle of another batch geometry.
        """
        self._step, self._rollout, self._resumed_at = 0, None, None
        self._actor_metrics.sums.clear()  # of a call that was broken off
        self._nonfinite.load_state(NonFiniteSteps(0).state())
        self._load_scoring({})
        if resume_from_checkpoint:
            explicit = resume_from_checkpoint is not True
            folder = (
                Path(resume_from_checkpoint) if explicit else last_usable(self.args.output_dir, self._changed_settings)
            )
            self._restore(folder)
            resume_from_checkpoint = str(folder)
        if self.args.preflight:
            print_preflight(self)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _geometry(self) -> dict[str, Any]:
        """What must not change while responses generated before a checkpoint are trained on after it."""
        names = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "steps_per_generation",
            "num_generations",
            # What was computed of the responses when they were generated
            "policy_loss",
            "adv_estimator",
            "rollout_is",
            "rollout_rs",
            "teacher_model",
            "distillation_loss_mode",
            "distillation_topk",
        )
        return {
            "ranks": self.accelerator.num_processes,
            "num_iterations": self.num_iterations,
            **{name: getattr(self.args, name) for name in names},
        }

    def _changed_settings(self, folder: Path) -> list[str]:
        """Which settings of a checkpoint differ from the present ones; raises `ValueError` if it cannot be resumed."""
        facts, present = read_marker(folder), self._geometry()
        written = facts["geometry"]
        changed = [
            f"{name} {written[name]} then, {present[name]} now"
            for name in present
            if written.get(name, present[name]) != present[name]
        ]
        if written["ranks"] != present["ranks"]:
            raise ValueError(f"{folder} cannot be resumed exactly: {'; '.join(changed)}; use the same settings")
        if changed and facts["inside_cycle"]:
            raise ValueError(
                f"{folder} lies inside a generation cycle and cannot be resumed with other settings: "
                f"{'; '.join(changed)}; use the same ones"
            )
        return changed

    def _restore(self, folder: Path) -> None:
        if self.args.sync_ref_model:
            raise ValueError(
                f"{folder} cannot be resumed with sync_ref_model=True: the reference changes during training and is "
                f"not saved; set sync_ref_model=False, or start anew"
            )
        changed = self._changed_settings(folder)
        state = read_rank_state(folder, self.accelerator.process_index, self.accelerator.device)
        if changed:
            logger.warning(
                "%s was written with other settings, so the run goes on differently: %s", folder, "; ".join(changed)
            )
        else:
            self._step, self._resumed_at = state["step"], (state["epoch"], state["batches"])
        self._rollout = None if state["rollout"] is None else Rollout.from_state(state["rollout"])
        self._nonfinite.load_state(state["nonfinite"])
        self._load_scoring(state)

    def _load_scoring(self, state: dict[str, Any]) -> None:
        """The reward's KL coefficient and the place in the further prompts, of a checkpoint or (`{}`) of the start."""
        self._scorer.load_state(state.get("scorer"))
        if self._dynamic_sampler is not None:
            self._dynamic_sampler.stream.load_state(state.get("further_prompts"))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.save_only_model:  # and nothing to resume from
            super()._save_checkpoint(model, trial)
            return
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            make_room(folder)
        self.accelerator.wait_for_everyone()
        # Older checkpoints may go only once this one is complete, so the Trainer must not remove them before
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        folder.mkdir(parents=True, exist_ok=True)  # on a node that saves nothing else
        inside_cycle = self._rollout is not None and self._step % self._cycle != 0
        state = {
            "step": self._step,
            "epoch": self._epoch,
            "batches": self._step - self._epoch_start,
            "rollout": self._rollout.state() if inside_cycle else None,
            "nonfinite": self._nonfinite.state(),
            "scorer": self._scorer.state(),
            "further_prompts": None if self._dynamic_sampler is None else self._dynamic_sampler.stream.state(),
        }
        write_rank_state(folder, self.accelerator.process_index, state)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            facts = {"step": self.state.global_step, "inside_cycle": inside_cycle, "geometry": self._geometry()}
            write_marker(folder, facts)
        self.accelerator.wait_for_everyone()  # complete on every node
        if self.args.should_save:
            remove_older(folder, limit, self.state.best_model_checkpoint)

    # The order of prompts depends on the epoch alone

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        self._train_sampler = EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )
        return self._train_sampler

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        """The Trainer's; it takes a stream, whose epochs have no known length, to be still in its first."""
        position = super()._init_training_state(*args, **kwargs)
        streamed = isinstance(self.train_dataset, IterableDataset) and not self.args.ignore_data_skip
        return self._resumed_at if streamed and self._resumed_at is not None else position

    def _run_epoch(self, *, epoch: int, **kwargs) -> None:
        if self.state.global_step >= self.state.max_steps:  # the last checkpoint was resumed; the Trainer would go on
            self.control.should_training_stop = True
            return
        if self._train_sampler is not None:
            self._train_sampler.epoch = epoch
        resumed = kwargs["resume_from_checkpoint"] is not None and epoch == kwargs["epochs_trained"]
        self._epoch = epoch
        self._epoch_start = self._step - (kwargs["steps_trained_in_current_epoch"] if resumed else 0)
        super()._run_epoch(epoch=epoch, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, after the metrics of an evaluation that ends have been reduced; call it on every rank."""
        if not self.model.training:
            self._actor_metrics.finish_evaluation()
        elif "loss" in logs:
            logs["actor/nonfinite_skips"] = self._nonfinite.total
        super().log(logs, start_time)
