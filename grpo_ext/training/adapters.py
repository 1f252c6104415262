"""Adapters: a model given as the path of a saved one, and which combinations can be trained."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils.peft_utils import find_adapter_config_file
from trl.trainer import grpo_trainer
from trl.trainer.utils import create_model_from_path

# What `model_init_kwargs` says about reaching the hub holds for the adapter as for its base model.
_HUB_KEYS = ("token", "cache_dir", "local_files_only")


def is_adapter(model: Any, **hub: Any) -> bool:
    """Whether this is the path or the hub id of a saved adapter (a folder with `adapter_config.json`)."""
    if not isinstance(model, (str, os.PathLike)):
        return False
    try:
        return find_adapter_config_file(str(model), **hub) is not None
    except (OSError, ValueError):  # neither a folder nor a possible hub id; loading it as a model says so
        return False


def load_adapter(path: str, *, is_trainable: bool, base: str | None = None, **model_init_kwargs: Any) -> PeftModel:
    """A saved adapter on its base model.

    Args:
        path: folder or hub id of the adapter.
        is_trainable: whether the adapter is to be trained further; the base model is frozen in any case.
        base: folder or hub id of the base model; `None`: the one that the adapter names.
        model_init_kwargs: of the base model (`dtype`, `attn_implementation`, `revision`, ...), as TRL takes them.

    Raises:
        ValueError: no base model is named, it cannot be loaded, or the adapter does not fit it.
    """
    hub = {key: model_init_kwargs[key] for key in _HUB_KEYS if key in model_init_kwargs}
    try:
        config = PeftConfig.from_pretrained(path, **hub)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"adapter_config.json of {path} cannot be read ({type(error).__name__}: {error})") from error
    named = config.base_model_name_or_path
    if not (base or named):
        raise ValueError(
            f"{path} names no base model (base_model_name_or_path in adapter_config.json is empty): its model was made "
            f"in memory; name the base model's folder there"
        )
    if base is None and config.revision is not None:
        model_init_kwargs.setdefault("revision", config.revision)
    try:
        model = create_model_from_path(base or named, **model_init_kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"the base model {base or named!r} of the adapter {path} cannot be loaded ({error}); correct "
            f"base_model_name_or_path in its adapter_config.json"
        ) from error
    # ZeRO-3 cannot gather float32 adapters together with a bfloat16 base: deepspeedai/DeepSpeed#8072
    autocast = getattr(model, "is_quantized", False) or not is_deepspeed_zero3_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            model = PeftModel.from_pretrained(
                model, path, is_trainable=is_trainable, autocast_adapter_dtype=autocast, **hub
            )
            # Once more, since only this tells of weights that the base model has no place for
            left = model.load_adapter(path, "default", is_trainable=is_trainable, **hub).unexpected_keys
            if left:
                raise ValueError(f"it has no place for {len(left)} of the adapter's weights, first {left[0]}")
        except (UserWarning, RuntimeError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"the adapter {path} cannot be put on {base or named!r} ({str(error)[:500]}); use the base model that "
                f"it was trained on"
            ) from error
    return model


@contextmanager
def saved_adapters_train() -> Iterator[None]:
    """Let TRL's constructor load the path of an adapter as a `PeftModel` that can be trained.

    TRL 1.16 looks for a model's config in such a folder and ends there; or, where one lies beside the adapter, makes a
    model that is no `PeftModel`, whose adapter is frozen. Inside its 600-line constructor only the loading is replaced.
    """
    load = grpo_trainer.create_model_from_path

    def load_either(model_id, *args, **kwargs):
        if is_adapter(model_id, **{key: kwargs[key] for key in _HUB_KEYS if key in kwargs}):
            return load_adapter(model_id, is_trainable=True, **kwargs)
        return load(model_id, *args, **kwargs)

    grpo_trainer.create_model_from_path = load_either
    try:
        yield
    finally:
        grpo_trainer.create_model_from_path = load


def require_one_adapter(model: Any, peft_config: PeftConfig | None) -> None:
    """Fail on a new adapter on top of an old one, and on an adapter that is hidden in a plain model.

    Raises:
        ValueError: names both adapters, or how to load the one for training.
    """
    if getattr(model, "_hf_peft_config_loaded", False) and not isinstance(model, PeftModel):
        raise ValueError(
            "the model carries a frozen adapter that transformers loaded into it; pass the adapter's path as the "
            "model, or load it with PeftModel.from_pretrained(base, path, is_trainable=True)"
        )
    if peft_config is None or not (isinstance(model, PeftModel) or is_adapter(model)):
        return
    given = "a PeftModel" if isinstance(model, PeftModel) else f"the saved adapter {str(model)!r}"
    raise ValueError(
        f"model is {given} and peft_config={type(peft_config).__name__} asks for a new adapter on top of it; drop "
        f"peft_config to train the adapter further, or merge it into its base model first (python -m grpo_ext.merge)"
    )


@torch.no_grad()
def complete_reference(model: nn.Module) -> None:
    """Copy to the frozen reference adapter what TRL's constructor leaves out, if there is such an adapter.

    TRL 1.16 copies the parameters with `.default.` in their names to the adapter `ref`. Where a kind keeps its weights
    in a dict of parameters (LoRA of embeddings, IA3), the names end with `.default`, and the reference would begin as
    another policy.
    """
    if not isinstance(model, PeftModel) or "ref" not in model.peft_config:
        return
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parts = name.split(".")
        if "default" in parts:
            parameters[".".join("ref" if part == "default" else part for part in parts)].copy_(parameter)
