"""On-policy distillation in the trainer: the teacher's scores, once per generation, and the loss that reads them."""

import functools
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..objective.distillation import TopKScores, distillation_ppo_loss
from .config import GRPOVerlConfig
from .forward import Rows, Scores, row_lengths
from .teacher import ModelTeacher, ServedTeacher, load_tokenizer, require_same_vocabulary
from .windows import Batch

LOG_PROBS, TOPK_IDS, TOPK_LOG_PROBS = "teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs"


class Distiller:
    """A teacher, what it says of each generation batch, and the loss with it.

    Args:
        args: `teacher_model` and the settings of the distillation.
        accelerator: where the student is.
        tokenizer: the student's.
        model: the student.
        layout: of its forwards.

    Raises:
        ValueError: the teacher has another vocabulary, or the layout cannot carry top-k scores.
        ConnectionError: a served teacher does not answer.
    """

    def __init__(self, args: GRPOVerlConfig, accelerator: Accelerator, tokenizer: Any, model: nn.Module, layout: str):
        self._settings = args.distillation_config()
        self._topk = self._settings.distillation_topk if self._settings.uses_topk else None
        if self._topk is not None and layout == "padded":
            raise ValueError(
                f"distillation_loss_mode={self._settings.distillation_loss_mode!r} needs forwards without padding; "
                f"leave forward_layout='auto', or set distillation_loss_mode='k3'"
            )
        name = args.teacher_model
        if name.startswith(("http://", "https://")):
            self._teacher = ServedTeacher(name)
        else:
            own = load_tokenizer(name)
            require_same_vocabulary(tokenizer, own, name)  # before its weights are loaded
            kept = {"attn_implementation"} & set(args.model_init_kwargs or {})
            loading = {key: args.model_init_kwargs[key] for key in kept}
            self._teacher = ModelTeacher(name, own, model_init_kwargs=loading)
            self._teacher.place(accelerator)
        rows = model.get_input_embeddings().num_embeddings
        self._teacher.check(tokenizer, rows, self._topk)
        self.loss = functools.partial(distillation_ppo_loss, distillation=self._settings)

    def score(self, batch: Batch) -> None:
        """Put the teacher's scores of this rank's generation batch into it; call it on every rank.

        Raises:
            ValueError: the batch has images.
        """
        if "pixel_values" in batch:
            raise ValueError("teacher_model is shown no images, and the rollout has some; drop it, or train on text")
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        width = batch["completion_ids"].size(1)
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        scores = self._teacher.score(Rows(input_ids, width, row_lengths(attention, width)), self._topk)
        batch[LOG_PROBS] = scores.log_probs
        if scores.topk is not None:
            batch[TOPK_IDS], batch[TOPK_LOG_PROBS] = scores.topk

    def terms(self, inputs: Batch, scores: Scores) -> dict[str, Any]:
        """What `loss` reads of a micro-batch beside the arguments of `ppo_loss`."""
        if self._topk is None:
            return {"teacher_log_prob": inputs[LOG_PROBS]}
        return {"topk": TopKScores(scores.topk.log_probs, inputs[TOPK_LOG_PROBS], scores.topk.overlap)}
