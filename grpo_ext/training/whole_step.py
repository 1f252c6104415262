"""Policy losses that look at the whole optimizer step, computed over all its micro-batches and ranks."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..objective import ObjectiveConfig
from ..objective.masking import keep, to_tokens
from .windows import Batch, response_mask


def over_whole_step(
    function: Callable[..., Tensor],
    micro_batches: list[Batch],
    log_probs: list[Tensor],
    config: ObjectiveConfig,
    seed: int,
    accelerator: Accelerator,
) -> None:
    """Put each micro-batch's rows of `function` over the whole step into it, as `of_step` `(B, T)`.

    All ranks compute it for all rows, in the order in which they were generated, so that neither the split nor the
    exchange of rows changes anything, and draw from one seed.

    Args:
        function: a policy loss's step function.
        micro_batches: of the optimizer step, on this rank.
        log_probs: of each, `(B, T)`, nats, the policy's before the step.
        config: the settings.
        seed: of the draws; the same on every rank.
        accelerator: gathers the rows.
    """
    width = max(log_prob.size(1) for log_prob in log_probs)
    rows: list[list[Tensor]] = []
    for micro, log_prob in zip(micro_batches, log_probs, strict=True):
        mask = response_mask(micro)
        old = micro.get("old_per_token_logps")
        advantages = to_tokens("advantages", micro["advantages"], log_prob.shape)
        values = [keep(x, mask) for x in (log_prob, log_prob if old is None else old, advantages)]
        values.append(mask.to(values[0].dtype))
        rows.append([nn.functional.pad(x, (0, width - x.size(1))) for x in values])
    mine = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    numbers = torch.cat([micro["row_index"] for micro in micro_batches])
    everywhere, all_numbers = _gathered(torch.stack(mine, 1), numbers, accelerator)
    order = all_numbers.argsort(stable=True)
    log_prob, old, advantages, mask = everywhere[order].unbind(1)
    generator = torch.Generator().manual_seed(seed)
    of_step = function(log_prob, old, advantages, mask > 0, config=config, generator=generator)
    # Numbers ascend, so that a search finds each of this rank's rows
    found = of_step[torch.searchsorted(all_numbers[order], numbers)]
    for micro, part in zip(micro_batches, found.split([len(x) for x in log_probs]), strict=True):
        micro["of_step"] = part[:, : micro["completion_ids"].size(1)]


def _gathered(values: Tensor, numbers: Tensor, accelerator: Accelerator) -> tuple[Tensor, Tensor]:
    """All ranks' rows `(N, 4, T)` and their numbers `(N,)`; ranks may have unequal many, and unequally long ones."""
    if accelerator.num_processes == 1:
        return values, numbers
    for dim in (2, 0):
        values = accelerator.pad_across_processes(values.contiguous(), dim=dim)
    numbers = accelerator.pad_across_processes(numbers + 1)  # 0 is a row that is only padding
    values, numbers = accelerator.gather(values), accelerator.gather(numbers) - 1
    return values[numbers >= 0], numbers[numbers >= 0]
