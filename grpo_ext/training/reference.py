"""The frozen reference model: the policy as it was when the trainer was made."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.trainer import grpo_trainer


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model object as it is now, without gradients (README, departure 14).

    Under DeepSpeed ZeRO-3 a parameter holds only this rank's shard, which a deep copy would tear from its bookkeeping;
    there the copy is built anew, sharded in its turn, and filled one gathered parameter at a time.
    """
    reference = _copy_sharded(model) if is_deepspeed_zero3_enabled() else copy.deepcopy(model)
    for parameter in reference.parameters():
        parameter.requires_grad_(False)
    return reference.eval()


def _copy_sharded(model: PreTrainedModel) -> PreTrainedModel:
    import deepspeed

    reference = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    target = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        sharded = [p for p in (parameter, target[name]) if hasattr(p, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0):
            if torch.distributed.get_rank() == 0 or not hasattr(target[name], "ds_id"):
                target[name].data.copy_(parameter.data)
    buffers = dict(model.named_buffers())
    for name, buffer in reference.named_buffers():
        buffer.data.copy_(buffers[name])
    return reference


@contextmanager
def reference_is(reference: nn.Module | None) -> Iterator[None]:
    """Let TRL's constructor take this model where it would load the reference by the policy's name.

    TRL 1.16 sets the reference up (dropout, fused head, DeepSpeed, FSDP, syncing) right after loading it, inside its
    600-line constructor; for a policy passed as an object only the loading is wrong, so only that is replaced.

    Args:
        reference: the model; `None` leaves TRL's loading alone.
    """
    load = grpo_trainer.create_model_from_path
    if reference is not None:
        grpo_trainer.create_model_from_path = lambda *args, **kwargs: reference
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = load
