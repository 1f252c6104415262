"""Log-probabilities of k given tokens at each labelled position, from inside the model's own forward.

TRL's fused head scores the sampled token `a` of each position and never holds the logits of all tokens. Any other token
`v` has the same normaliser, so that `log p(v) = log p(a) + z_v - z_a` with the logits `z`: the k logits are enough, and
their gradient beside that of `log p(a)` is sparse. Nothing here grows with tokens times vocabulary but a bounded chunk.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from trl.trainer import utils as trl_utils

from .forward import Rows, Scores, compact_head, score

_CHUNK = 2**24  # elements of the largest buffer, whatever the number of tokens


class Head(NamedTuple):
    """What TRL's fused head projects: `N` labelled positions onto `V` tokens."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,)
    temperature: float
    softcapping: float | None
    logit_scale: float

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the projection: autocast's where it is on."""
        device = self.hidden.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.hidden.dtype

    def logits(self, projected: Tensor) -> Tensor:
        """Logits of the distribution that is sampled from, at least float32: scaled, capped, divided by temperature."""
        z = _wide(projected) * self.logit_scale
        if self.softcapping is not None:
            z = self.softcapping * torch.tanh(z / self.softcapping)
        return z / self.temperature

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Projections of a few positions at a time, `(n, V)`, without gradient."""
        dtype = self.dtype
        weight = self.weight.detach().to(dtype)
        for part in _parts(len(self.hidden), weight.shape[0]):
            tile = self.hidden.detach()[part].to(dtype) @ weight.t()
            yield part, tile if self.bias is None else tile + self.bias.detach().to(dtype)


class StudentTopK(NamedTuple):
    """The student at given tokens, `(N, K)` for the positions of a forward or `(B, C, K)` for rows."""

    log_probs: Tensor  # nats, with gradient
    overlap: Tensor | None  # whether the token is among the student's own K most likely; ties count as among


class TeacherTopK(NamedTuple):
    """The most likely tokens, most likely first, `(N, K)` or `(B, C, K)`."""

    ids: Tensor  # int32
    log_probs: Tensor  # nats


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _parts(count: int, width: int) -> list[slice]:
    """Consecutive parts of `count` rows of `width` elements, each of at most `_CHUNK` elements."""
    size = max(_CHUNK // max(width, 1), 1)
    return [slice(start, start + size) for start in range(0, count, size)]


class _ChosenProjections(torch.autograd.Function):
    """`(hidden @ weight.T + bias)` at `ids` `(N, K)` only, `(N, K)`; gathers the rows of the weight in chunks."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.dtype = dtype
        projected = hidden.new_empty(ids.shape, dtype=dtype)
        for part in _parts(len(ids), ids.shape[1] * hidden.shape[1]):
            rows = weight[ids[part]].to(dtype)
            projected[part] = torch.bmm(rows, hidden[part].to(dtype).unsqueeze(-1)).squeeze(-1)
            if bias is not None:
                projected[part] += bias[ids[part]].to(dtype)
        return projected

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden, weight, bias, ids = ctx.saved_tensors
        # As TRL's own head: under ZeRO-3 the weight is a shard again by now
        with trl_utils.maybe_gather_lm_head_ctx(weight, bias):
            grad = _wide(grad)
            wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
            grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
            grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if wants_weight else None
            for part in _parts(len(ids), ids.shape[1] * hidden.shape[1]):
                if wants_hidden:
                    rows = weight[ids[part]].to(ctx.dtype).to(grad.dtype)
                    summed = torch.bmm(grad[part].unsqueeze(1), rows).squeeze(1)
                    grad_hidden[part] = summed.to(hidden.dtype)
                if wants_weight:
                    outer = grad[part].unsqueeze(-1) * hidden[part].to(ctx.dtype).to(grad.dtype).unsqueeze(1)
                    grad_weight.index_add_(0, ids[part].flatten(), outer.flatten(0, 1))
            grad_bias = None
            if wants_bias:
                grad_bias = torch.zeros_like(bias, dtype=grad.dtype).index_add_(0, ids.flatten(), grad.flatten())
                grad_bias = grad_bias.to(bias.dtype)
            grad_weight = grad_weight.to(weight.dtype) if wants_weight else None
        return grad_hidden, grad_weight, grad_bias, None, None


def chosen_log_probs(head: Head, sampled_log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of given tokens, with gradient, `(N, K)`, nats.

    Args:
        head: the positions.
        sampled_log_probs: `(N,)`, nats, of `head.targets`, with gradient; brings the normaliser.
        ids: `(N, K)`.
    """
    both = torch.cat([ids.long(), head.targets.unsqueeze(1)], 1)
    z = head.logits(_ChosenProjections.apply(head.hidden, head.weight, head.bias, both, head.dtype))
    return z[:, :-1] - z[:, -1:] + sampled_log_probs.unsqueeze(1)


@torch.no_grad()
def among_own_top(head: Head, ids: Tensor) -> Tensor:
    """Which of the tokens `ids` `(N, K)` are among the K most likely of the head itself, `(N, K)`, bool."""
    among = torch.empty(ids.shape, dtype=torch.bool, device=ids.device)
    for part, tile in head.tiles():
        least = tile.topk(min(ids.shape[1], tile.shape[1])).values[:, -1:]
        among[part] = tile.gather(1, ids[part].long()) >= least
    return among


@torch.no_grad()
def most_likely(head: Head, k: int, vocabulary: int | None = None) -> TeacherTopK:
    """The k most likely tokens of each position, `(N, k)`.

    Args:
        head: the positions.
        k: how many.
        vocabulary: only tokens below it are named; their probabilities are still out of all.
    """
    width = min(head.weight.shape[0], vocabulary or head.weight.shape[0])
    shape = (len(head.hidden), min(k, width))
    ids = torch.empty(shape, dtype=torch.int32, device=head.hidden.device)
    log_probs = torch.empty(shape, dtype=_wide(head.hidden).dtype, device=head.hidden.device)
    for part, tile in head.tiles():
        z = head.logits(tile)
        top = z[:, :width].topk(shape[1])
        ids[part] = top.indices.int()
        log_probs[part] = top.values - z.logsumexp(1, keepdim=True)
    return TeacherTopK(ids, log_probs)


@contextmanager
def head_seen_by(see: Callable[[Head, Tensor], None], device: torch.device) -> Iterator[None]:
    """Let `see` run wherever TRL's fused head runs inside a model's forward.

    There, and only there, the head's weight is whole under DeepSpeed ZeRO-3 and FSDP, and one forward serves both.

    Args:
        see: called with the labelled positions, row by row, and their log-probs `(N,)`; once in each forward.
        device: of the model.
    """
    fused = trl_utils._ChunkedLogProbFunction

    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcapping, logit_scale, outputs):
        per_token = fused.apply(
            hidden, weight, bias, targets, temperature, chunk_size, softcapping, logit_scale, outputs
        )
        see(Head(hidden, weight, bias, targets, temperature, softcapping, logit_scale), per_token[0])
        return per_token

    trl_utils._ChunkedLogProbFunction = SimpleNamespace(apply=apply)
    try:
        with compact_head(device):
            yield
    finally:
        trl_utils._ChunkedLogProbFunction = fused


@contextmanager
def student_topk(ids: Iterable[Tensor], device: torch.device, *, overlap: bool = True) -> Iterator[list[StudentTopK]]:
    """Collect, of each forward in the block, the log-probabilities of given tokens beside what the forward returns.

    Args:
        ids: for each forward in turn, `(N, K)`: tokens of its labelled positions, row by row.
        device: of the model.
        overlap: whether to find out which of them are among the model's own K most likely.

    Yields:
        A list that grows by one `StudentTopK` of `(N, K)` per forward.

    Raises:
        ValueError: a forward scores another number of positions, or there are more forwards than `ids`.
    """
    collected: list[StudentTopK] = []
    coming = iter(ids)

    def see(head: Head, sampled_log_probs: Tensor) -> None:
        chosen = next(coming, None)
        if chosen is None or len(chosen) != len(head.targets):
            raise ValueError(
                f"forward {len(collected)} scores {len(head.targets)} positions and was given the tokens of "
                f"{0 if chosen is None else len(chosen)}; give ids of every labelled position of every forward"
            )
        log_probs = chosen_log_probs(head, sampled_log_probs, chosen)
        collected.append(StudentTopK(log_probs, among_own_top(head, chosen) if overlap else None))

    with head_seen_by(see, device):
        yield collected


def spread(parts: list[Tensor], targets: list[Tensor], shape: tuple[int, int], fill: float = 0) -> Tensor:
    """Values of labelled positions, `(N, K)` each, as `(B, C, K)`; `fill` elsewhere.

    Args:
        parts: values of each forward, at least one.
        targets: for each, where its rows belong in the flattened `(B, C)`, as `Rows.targets` gives it.
        shape: `(B, C)`.
        fill: of positions that no forward scored.
    """
    values = torch.cat(parts)
    empty = values.new_full((shape[0] * shape[1], values.shape[1]), fill)
    return empty.index_put((torch.cat(targets).to(values.device),), values).view(*shape, -1)


def score_topk(
    model: nn.Module,
    rows: Rows,
    groups: list[list[int]],
    ids: Tensor,
    *,
    packed: bool = False,
    entropy: bool = False,
    aux_loss: bool = False,
    overlap: bool = True,
) -> tuple[Scores, StudentTopK]:
    """`score`, and in the same forwards the log-probabilities of given tokens at every completion position.

    Args:
        model, rows, groups, packed, entropy, aux_loss: as in `score`.
        ids: `(B, C, K)`, tokens; whatever stands outside the completions is not read.
        overlap: whether to find out which of them are among the model's own K most likely.

    Returns:
        What `score` returns, unchanged to the last bit, and `StudentTopK` of `(B, C, K)`, 0 where nothing was scored.
    """
    shape = (len(rows.lengths), rows.width)
    flat = ids.flatten(0, 1)
    targets = [rows.targets(group) if group else None for group in groups]
    # An empty group is a forward with one label that counts for nothing
    wanted = [flat[:1] if where is None else flat[where.to(flat.device)] for where in targets]
    with student_topk(wanted, rows.input_ids.device, overlap=overlap) as collected:
        scores = score(model, rows, groups, packed=packed, entropy=entropy, aux_loss=aux_loss)
    real = [(part, where) for part, where in zip(collected, targets, strict=True) if where is not None]
    if not real:
        log_probs, among = flat.new_zeros(ids.shape, dtype=torch.float32), flat.new_zeros(ids.shape, dtype=torch.bool)
    else:
        log_probs = spread([part.log_probs for part, _ in real], [where for _, where in real], shape)
        among = spread([part.overlap for part, _ in real], [where for _, where in real], shape) if overlap else None
    for part, where in zip(collected, targets, strict=True):
        if where is None:  # attached to the graph, as in `score`
            log_probs = log_probs + 0.0 * part.log_probs.sum()
    return scores, StudentTopK(log_probs, among if overlap else None)
