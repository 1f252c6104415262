"""Merge a trained adapter into its base model: a plain model folder that needs no peft.

    python -m grpo_ext.merge ADAPTER_DIR OUTPUT_DIR [--base MODEL] [--dtype bfloat16]

The sum of the weights is made in float32 on the CPU (4 bytes per parameter) and rounded once, to `--dtype`. The folder
appears only after the model loaded from it has given the adapter's logits.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.utils.hub import has_file
from trl.trainer.utils import create_model_from_path

from .training.adapters import load_adapter

# Largest difference of a logit, in units of the largest logit: float32 sums in another order; the rounding of weights
# to the others moves logits by some of their epsilons (1e-3 and 8e-3).
TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Merged(NamedTuple):
    """What a merge has shown; both numbers in units of the adapter's largest logit."""

    dtype: torch.dtype  # of the weights in the folder
    gap: float  # the largest difference between a logit of the folder's model and the adapter's
    effect: float  # the largest difference between a logit of the base model and the adapter's


def merge(adapter: str, output: str, *, base: str | None = None, dtype: str = "auto") -> Merged:
    """Write the adapter's base model with the adapter added to its weights, its tokenizer and generation config.

    Args:
        adapter: folder of the adapter.
        output: folder to make; must be absent or empty.
        base: folder or hub id of the base model; `None`: the one that the adapter names.
        dtype: of the weights written: `float32`, `float16`, `bfloat16`, or `auto`, the base model's own.

    Raises:
        ValueError: there is no adapter, its base model cannot be loaded, the adapter's kind cannot be merged, the
            output folder is not empty, or the model written differs from the adapter by more than `TOLERANCES`.
    """
    folder = Path(output)
    if not (Path(adapter) / "adapter_config.json").is_file():
        raise ValueError(f"{adapter} has no adapter_config.json; give the folder of a saved adapter")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{output} exists and is not an empty folder; give a new folder")
    model = load_adapter(adapter, is_trainable=False, base=base, dtype=torch.float32, device_map=None).eval()
    if not hasattr(model.base_model, "merge_and_unload"):
        raise ValueError(f"{adapter} is of type {model.peft_type.value}, which has no weights to add to a model")
    # The base model's name as given: where its tokenizer and its dtype are found
    base = base or model.peft_config["default"].base_model_name_or_path
    written = AutoConfig.from_pretrained(base).dtype if dtype == "auto" else getattr(torch, dtype)
    written = written or torch.float32

    probe = _probe(model)
    wanted = _logits(model, probe)
    with model.disable_adapter():
        effect = _gap(_logits(model, probe), wanted)
    scratch = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        model.merge_and_unload(safe_merge=True).to(written).save_pretrained(scratch)
        _save_tokenizer(scratch, adapter, base)
        del model  # before the second one is loaded
        gap = _gap(_logits(create_model_from_path(str(scratch), dtype=torch.float32, device_map=None), probe), wanted)
        if not gap <= TOLERANCES[written]:
            raise ValueError(
                f"the merged model's logits differ from the adapter's by {gap:.2g} of the largest, more than "
                f"{TOLERANCES[written]:g} for {_name(written)}: nothing was written. Try --dtype float32; a base model "
                f"with tied embeddings cannot take an adapter on one of them"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Merged(written, gap, effect)


def _probe(model: nn.Module) -> Tensor:
    """Fixed token ids `(2, 32)`, of the vocabulary's beginning: special tokens of images and tools stand at its end."""
    size = min(model.get_input_embeddings().num_embeddings, 1000)
    return torch.randint(size, (2, 32), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model.eval()(input_ids=ids).logits.float()


def _gap(logits: Tensor, wanted: Tensor) -> float:
    return ((logits - wanted).abs().max() / wanted.abs().max()).item()


def _save_tokenizer(folder: Path, adapter: str, base: str) -> None:
    """Beside the model: the adapter's tokenizer (training may have set its padding), or else the base model's."""
    for source in (adapter, base):
        if not has_file(source, "tokenizer_config.json"):
            continue  # transformers would make an empty tokenizer of the model's type
        try:
            processing_class = AutoProcessor.from_pretrained(source)
        except (OSError, ValueError):  # an adapter's folder does not say of what type the model is
            processing_class = AutoTokenizer.from_pretrained(source)
        processing_class.save_pretrained(folder)
        return
    print(f"warning: neither {adapter} nor {base} has a tokenizer; the merged folder has none", file=sys.stderr)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: list[str] | None = None) -> None:
    """The command line; `arguments` stand for `sys.argv[1:]`."""
    parser = argparse.ArgumentParser(prog="python -m grpo_ext.merge", description=__doc__.split("\n")[0])
    parser.add_argument("adapter", metavar="ADAPTER_DIR", help="folder of the adapter (has adapter_config.json)")
    parser.add_argument("output", metavar="OUTPUT_DIR", help="folder to make; absent or empty")
    parser.add_argument("--base", help="folder or hub id of the base model; default: the one that the adapter names")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *map(_name, TOLERANCES)],
        help="of the weights written; default: the base model's own",
    )
    given = parser.parse_args(arguments)
    try:
        done = merge(given.adapter, given.output, base=given.base, dtype=given.dtype)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(
        f"{given.output}: a {_name(done.dtype)} model whose logits are the adapter's within {done.gap:.1e} of the "
        f"largest (tolerance {TOLERANCES[done.dtype]:g}; the adapter itself moves them by {done.effect:.1e})"
    )
    if done.gap >= done.effect > 0:
        print(
            f"warning: rounding to {_name(done.dtype)} moves the logits as much as the adapter does, so the merged "
            f"model may have lost what was learnt; use --dtype float32",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
