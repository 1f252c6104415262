"""What is refused before a model is loaded: an output folder, a dataset or an adapter that cannot work."""

import logging
import os
import tempfile
from collections.abc import Sized
from typing import Any

from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch import nn

from .config import GRPOVerlConfig

logger = logging.getLogger(__name__)


def require_writable(folder: str | None) -> None:
    """Make the output folder, or fail naming it.

    Raises:
        ValueError: it cannot be made, or a file cannot be written into it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, TypeError) as error:
        raise ValueError(f"output_dir={folder!r} cannot be written to ({error}); choose a writable folder") from error


def require_prompts(dataset: Any, name: str) -> None:
    """Fail unless the dataset has a `prompt` column.

    Raises:
        ValueError: names the dataset and the columns that it has.
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return  # TRL's own error names the type
    columns = dataset.column_names
    if columns is None and isinstance(dataset, IterableDataset):
        first = next(iter(dataset), None)
        if first is None:
            raise ValueError(f"{name} is empty; give it at least one row with a 'prompt'")
        columns = list(first)
    for taken in ("prompts", "completions"):
        if taken in columns:
            raise ValueError(
                f"{name} has a column {taken!r}, the name of an argument that reward functions get; rename it with "
                f"dataset.rename_column({taken!r}, 'my_{taken}')"
            )
    if "prompt" not in columns:
        raise ValueError(
            f"{name} has no 'prompt' column (it has {sorted(columns)}); rename one, for example with "
            f"dataset.rename_column({sorted(columns)[0]!r}, 'prompt')"
            if columns
            else f"{name} has no columns; give it a 'prompt' column"
        )


def require_full_batches(dataset: Any, args: GRPOVerlConfig) -> None:
    """Fail if the dataset cannot fill one generation batch; warn of prompts that an epoch drops.

    Raises:
        ValueError: fewer prompts than a generation batch takes.
    """
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return
    needed = args.generation_batch_size // args.num_generations
    if len(dataset) < needed:
        raise ValueError(
            f"train_dataset has {len(dataset)} prompts and a generation batch takes {needed} "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}); give more "
            f"prompts, or lower per_device_train_batch_size or steps_per_generation"
        )
    dropped = len(dataset) % needed
    if dropped:
        logger.warning(
            "%d of %d prompts are left out in each epoch: a generation batch takes %d prompts, and an incomplete one "
            "is dropped",
            dropped,
            len(dataset),
            needed,
        )


def require_trainable(model: nn.Module) -> None:
    """Fail if no parameter of the model would be trained; those of an adapter that is not active would not be.

    Raises:
        ValueError: says how an adapter is loaded for training.
    """
    idle = set(model.peft_config) - set(model.active_adapters) if isinstance(model, PeftModel) else set()
    if any(p.requires_grad and idle.isdisjoint(name.split(".")) for name, p in model.named_parameters()):
        return
    if isinstance(model, PeftModel):
        raise ValueError(
            "the adapter has no trainable parameter, so training would change nothing; load it with "
            "PeftModel.from_pretrained(base, path, is_trainable=True)"
        )
    raise ValueError(
        "the model has no trainable parameter, so training would change nothing; set requires_grad on its parameters "
        "or pass a peft_config"
    )


def require_single_trained_adapter(model: nn.Module) -> None:
    """Fail on a `PeftModel` whose reference TRL would take from the wrong adapter.

    Raises:
        ValueError: the active adapter is not named `default`, or an adapter named `ref` is there already.
    """
    if not isinstance(model, PeftModel):
        return
    active = model.active_adapters if isinstance(model.active_adapters, list) else [model.active_adapter]
    if active != ["default"]:
        raise ValueError(
            f"the active adapter is {active}; TRL trains and copies the adapter named 'default'. Load it with "
            f"PeftModel.from_pretrained(base, path, is_trainable=True), which names it so"
        )
    if "ref" in model.peft_config:
        raise ValueError(
            "the model already has an adapter named 'ref', the name of the frozen reference; delete or rename it "
            "(model.delete_adapter('ref'))"
        )
