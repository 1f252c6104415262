"""Log-probabilities and entropies of completions without padding, through TRL's fused head.

TRL pads every row on the left to the longest prompt and on the right to the longest completion of the whole generation
batch. Here a row is its own tokens, from the left: under causal attention whatever stands to the right of a row changes
nothing in it, so rows of similar length share a forward without any mask (*grouped*), or all rows stand end to end with
positions that restart, for attention kernels that read row boundaries from them (*packed*).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from trl.trainer import utils as trl_utils

from .layout import RowLength

logger = logging.getLogger(__name__)

LAYOUTS = ("auto", "packed", "grouped", "padded")


class Scores(NamedTuple):
    """What a forward gives, each `(B, C)` with 0 where nothing was scored."""

    log_probs: Tensor  # nats
    entropies: Tensor | None  # nats
    aux_loss: Tensor | None  # scalar
    topk: Any = None  # `topk_head.StudentTopK`, `(B, C, K)`, at a teacher's tokens


@dataclass(frozen=True)
class Rows:
    """Rows in TRL's padded layout, and where in it each row's own tokens stand.

    Attributes:
        input_ids: `(B, P + C)`, prompts padded on the left, completions on the right.
        width: `C`.
        lengths: of each row, on the host.
    """

    input_ids: Tensor
    width: int
    lengths: list[RowLength]

    def starts(self, group: list[int]) -> list[int]:
        """The column of each row's first token."""
        prompts = self.input_ids.size(1) - self.width
        return [prompts - self.lengths[i].prompt for i in group]

    def targets(self, group: list[int]) -> Tensor:
        """Where the group's scores belong in the flattened `(B, C)`, row by row; on the host."""
        # Without a prompt the first token has nothing to be predicted from
        spans = [(i * self.width, self.lengths[i]) for i in group]
        return torch.cat([torch.arange(0 if n.prompt else 1, n.completion) + first for first, n in spans])


def row_lengths(attention_mask: Tensor, width: int) -> list[RowLength]:
    """Tokens of each row; waits for the device once.

    Args:
        attention_mask: `(B, P + C)`, 1 on each row's own tokens, which are contiguous.
        width: `C`.
    """
    prompts = attention_mask.size(1) - width
    counts = torch.stack([attention_mask[:, :prompts].sum(1), attention_mask[:, prompts:].sum(1)], 1)
    return [RowLength(*row) for row in counts.tolist()]


def choose_layout(asked: str, model: nn.Module, *, images: bool) -> tuple[str, str | None]:
    """The layout in force, and a reason to tell if it is not the one a user would expect.

    Args:
        asked: the setting, one of `LAYOUTS`.
        model: decides by its attention implementation.
        images: whether inputs may come with images, whose tensors are laid out for TRL's padded rows.

    Raises:
        ValueError: a layout that would be wrong for the model was asked for.

    Packing is right only where attention reads row boundaries from the positions, and pays only where it skips what
    lies between rows: varlen kernels. Dense attention would pay for the whole square.
    """
    if isinstance(model, PeftModel):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            if asked in ("packed", "grouped"):
                raise ValueError(f"forward_layout={asked!r} cannot carry virtual tokens; use 'auto' or 'padded'")
            return "padded", None if asked == "padded" else "the adapter puts virtual tokens before each row"
        model = model.get_base_model()
    config = model.config.get_text_config()
    attention = getattr(config, "_attn_implementation", None) or ""
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = getattr(model, "_is_stateful", False) or any(
        word in kind for kind in kinds for word in ("linear", "mamba", "recurrent", "conv")
    )
    if asked == "packed" and recurrent:
        raise ValueError(
            f"forward_layout='packed' is wrong for {type(model).__name__}: its recurrent layers carry state across the "
            f"rows of a pack; use 'auto' or 'grouped'"
        )
    if images:
        if asked in ("packed", "grouped"):
            raise ValueError(f"forward_layout={asked!r} cannot carry images; use 'auto' or 'padded'")
        return "padded", None if asked == "padded" else "inputs may have images, so rows are padded as in TRL"
    if asked != "auto":
        return asked, None
    if "flash" not in attention:
        return "grouped", None
    if recurrent:
        return "grouped", "its recurrent layers would carry state across the rows of a pack"
    return "packed", None


@contextmanager
def compact_head(device: torch.device) -> Iterator[None]:
    """Let TRL's fused head score the labelled positions only, on the CPU too.

    TRL 1.16 does so where Triton runs and scores every position elsewhere, because on devices that compile per shape
    each batch would compile anew. That holds for such devices only.
    """
    decide = trl_utils._use_triton
    if device.type in ("cpu", "mps"):
        trl_utils._use_triton = lambda _: True
    try:
        yield
    finally:
        trl_utils._use_triton = decide


class ForwardInputs(NamedTuple):
    """What goes into one forward, and where in it the labels stand.

    `labelled`: positions in the flattened inputs, row by row. They are known on the host: to find them on the device
    would make the host wait for it.
    """

    inputs: dict[str, Tensor]
    labelled: Tensor


def _upload(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, non_blocking=True)


def grouped_inputs(rows: Rows, group: list[int], *, with_mask: bool) -> ForwardInputs:
    """The group's rows from the left, padded on the right to the longest, with labels one place ahead.

    Args:
        rows: all rows.
        group: indices into them, at least one.
        with_mask: whether the model needs to know the padding (a mixture of experts counts its tokens).
    """
    lengths = [rows.lengths[i] for i in group]
    longest = max(n.total for n in lengths)
    device = rows.input_ids.device
    column = torch.arange(longest)
    start = torch.tensor(rows.starts(group))[:, None]
    total = torch.tensor([n.total for n in lengths])[:, None]
    prompt = torch.tensor([n.prompt for n in lengths])[:, None]
    where = _upload((start + column).clamp(max=rows.input_ids.size(1) - 1), device)
    ids = rows.input_ids[_upload(torch.tensor(group), device)].gather(1, where)
    inside = _upload(column < total, device)
    scored = (column >= prompt - 1) & (column < total - 1)
    labels = torch.where(_upload(scored, device), ids.roll(-1, 1), -100)
    inputs = {"input_ids": torch.where(inside, ids, ids[:, :1]), "shift_labels": labels}
    if with_mask:
        inputs["attention_mask"] = inside.long()
    return ForwardInputs(inputs, _upload(scored.flatten().nonzero()[:, 0], device))


def packed_inputs(rows: Rows, group: list[int]) -> ForwardInputs:
    """The group's rows end to end in one, with positions that restart at each row and labels one place ahead."""
    flat, positions, scored = [], [], []
    for i, start in zip(group, rows.starts(group), strict=True):
        n = rows.lengths[i]
        column = torch.arange(n.total)
        flat.append(column + start + i * rows.input_ids.size(1))
        positions.append(column)
        scored.append((column >= n.prompt - 1) & (column < n.total - 1))
    device = rows.input_ids.device
    ids = rows.input_ids.flatten()[_upload(torch.cat(flat), device)]
    all_scored = torch.cat(scored)
    labels = torch.where(_upload(all_scored, device), ids.roll(-1), -100)
    inputs = {
        "input_ids": ids[None],
        "position_ids": _upload(torch.cat(positions), device)[None],
        "shift_labels": labels[None],
    }
    return ForwardInputs(inputs, _upload(all_scored.nonzero()[:, 0], device))


def idle_inputs(rows: Rows) -> ForwardInputs:
    """Two tokens of the first row with one label: a forward for ranks that must run one and have no rows for it."""
    ids = rows.input_ids[:1, -2:]
    labels = torch.cat([ids[:, 1:], ids.new_full((1, 1), -100)], 1)
    return ForwardInputs({"input_ids": ids, "shift_labels": labels}, ids.new_zeros(1))


def score_group(
    model: nn.Module, rows: Rows, group: list[int], *, packed: bool, with_mask: bool, aux_loss: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run one forward; returns log-probs and entropies `(tokens,)` in the order of `Rows.targets`, and the aux loss."""
    if not group:
        inputs, labelled = idle_inputs(rows)
    elif packed:
        inputs, labelled = packed_inputs(rows, group)
    else:
        inputs, labelled = grouped_inputs(rows, group, with_mask=with_mask)
    if aux_loss:
        inputs["output_router_logits"] = True
    with compact_head(rows.input_ids.device):
        outputs = model(**inputs, fused_lm_head=True)
    entropies = None if outputs.entropy is None else outputs.entropy.flatten()[labelled]
    return outputs.log_probs.flatten()[labelled], entropies, outputs.aux_loss if aux_loss else None


def score(
    model: nn.Module,
    rows: Rows,
    groups: list[list[int]],
    *,
    packed: bool = False,
    entropy: bool = False,
    aux_loss: bool = False,
) -> Scores:
    """Log-probabilities (and entropies) of every completion token of the groups' rows, in TRL's `(B, C)`.

    Args:
        model: with TRL's fused head.
        rows: what is scored.
        groups: one forward each; an empty group is a forward that contributes 0.
        packed: rows of a group end to end, instead of padded to the longest.
        entropy: whether entropies are returned.
        aux_loss: whether the mixture-of-experts loss is returned, averaged over groups by their tokens.
    """
    shape = (len(rows.lengths), rows.width)
    log_probs, entropies, aux, weights, targets = [], [], [], [], []
    idle: list[tuple[Tensor | None, ...]] = []
    for group in groups:
        group_log_probs, group_entropies, group_aux = score_group(
            model, rows, group, packed=packed, with_mask=aux_loss, aux_loss=aux_loss
        )
        if not group:
            # Worth nothing, and attached to the graph output by output: its backward must visit the modules just as
            # another rank's does, since ZeRO-3 gathers weights in that order
            idle.append(tuple(x if x is None else 0.0 * x.sum() for x in (group_log_probs, group_entropies, group_aux)))
            continue
        log_probs.append(group_log_probs)
        entropies.append(group_entropies)
        aux.append(group_aux)
        weights.append(sum(rows.lengths[i].total for i in group))
        targets.append(rows.targets(group))

    def spread(parts: list[Tensor]) -> Tensor:
        values = torch.cat(parts)
        empty = values.new_zeros(shape[0] * shape[1])
        return empty.index_put((_upload(torch.cat(targets), values.device),), values).view(shape)

    nothing = rows.input_ids.new_zeros(shape, dtype=torch.float32)
    all_log_probs = spread(log_probs) if log_probs else nothing
    all_entropies = spread(entropies) if entropy and log_probs else nothing
    all_aux = (
        sum(a * w for a, w in zip(aux, weights, strict=True)) / sum(weights) if aux_loss and aux else nothing.sum()
    )
    return Scores(
        sum((outputs[0] for outputs in idle), start=all_log_probs),
        sum((outputs[1] for outputs in idle), start=all_entropies) if entropy else None,
        sum((outputs[2] for outputs in idle), start=all_aux) if aux_loss else None,
    )


def processed_tokens(lengths: list[RowLength], groups: list[list[int]], *, packed: bool) -> int:
    """Tokens that the groups' forwards run through the model, padding included."""
    if packed:
        return sum(lengths[i].total for group in groups for i in group)
    return sum(len(group) * max(lengths[i].total for i in group) for group in groups if group)
