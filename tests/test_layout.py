"""Forwards without padding: the same numbers as plain logits row by row, in plans that cost what they promise."""

import itertools
import json
import random

import pytest
import tiny
import torch
from trl.trainer.utils import add_fused_lm_head

from grpo_ext.training.forward import LAYOUTS, Rows, choose_layout, processed_tokens, row_lengths, score
from grpo_ext.training.layout import (
    CostModel,
    RowLength,
    balanced_parts,
    balanced_ranks,
    exactly,
    packed_groups,
    padded_groups,
)

COST = CostModel(crossover=1000.0, overhead=32.0)


def lengths(count=24, seed=0):
    draw = random.Random(seed)
    return [RowLength(draw.randint(1, 30), draw.choice([0, 1, 2, 5, 11, 40, 200])) for _ in range(count)]


def row_costs(rows):
    return [COST.row(n.total) for n in rows]


# Plans


def test_balanced_parts_cover_every_row_once_and_balance_cost():
    rows = lengths()
    parts = balanced_parts(rows, 4, row_costs(rows))
    assert sorted(itertools.chain(*parts)) == list(range(24))
    costs = [sum(COST.row(rows[i].total) for i in part) for part in parts]
    by_count = [sum(COST.row(rows[i].total) for i in range(k, k + 6)) for k in range(0, 24, 6)]
    assert max(costs) < max(by_count)
    assert max(costs) <= sum(costs) / 4 + max(COST.row(n.total) for n in rows)


@pytest.mark.parametrize("parts", [1, 3, 7, 24])
def test_balanced_parts_are_never_empty_and_the_best_consecutive_cut(parts):
    rows = lengths()
    result = balanced_parts(rows, parts, row_costs(rows))
    assert len(result) == parts and all(result)
    if parts == 3:
        order = list(itertools.chain(*result))
        costs = [max(COST.row(rows[i].total), 1e-9) for i in order]
        best = min(max(sum(costs[:a]), sum(costs[a:b]), sum(costs[b:])) for a in range(1, 23) for b in range(a + 1, 24))
        assert max(sum(COST.row(rows[i].total) for i in part) for part in result) == pytest.approx(best, rel=1e-6)


def test_balanced_parts_of_too_few_rows_is_an_error():
    with pytest.raises(ValueError, match="2 rows cannot be split into 3 parts"):
        balanced_parts([RowLength(1, 1)] * 2, 3, [1.0, 1.0])


def test_rows_of_zero_cost_are_still_dealt_out():
    parts = balanced_parts([RowLength(4, 0)] * 5, 2, [0.0] * 5)
    assert sorted(itertools.chain(*parts)) == list(range(5)) and all(parts)


def test_balanced_ranks_on_real_lengths():
    """64 real responses on 8 ranks: the slowest rank from 1.7 times the mean to under 1.1."""
    numbers = json.loads((tiny.EXAMPLES / "rollout_lengths.json").read_text())
    rows = [RowLength(*pair) for pair in zip(numbers["prompt_lengths"], numbers["completion_lengths"], strict=True)]
    costs = [COST.row(n.total) for n in rows]
    mean = sum(costs) / 8
    ranks = balanced_ranks(costs, 8, at_least=1)
    assert sorted(itertools.chain(*ranks)) == list(range(64))
    assert max(sum(costs[i] for i in rank) for rank in ranks) / mean < 1.1
    assert max(sum(costs[k : k + 8]) for k in range(0, 64, 8)) / mean > 1.6


@pytest.mark.parametrize("at_least", [1, 3])
def test_every_rank_gets_the_rows_it_needs(at_least):
    costs = [1000.0] + [1.0] * 11
    ranks = balanced_ranks(costs, 4, at_least)
    assert sorted(itertools.chain(*ranks)) == list(range(12))
    assert min(len(rank) for rank in ranks) >= at_least
    with pytest.raises(ValueError, match="12 rows cannot give each of 4 ranks 4"):
        balanced_ranks(costs, 4, 4)


def test_padded_groups_are_the_cheapest_of_all():
    rows = [RowLength(3, n) for n in (40, 38, 12, 11, 11, 2)] + [RowLength(9, 0)]
    groups = padded_groups(rows, COST)
    assert sorted(itertools.chain(*groups)) == list(range(6))  # the row without a completion is left out

    def price(plan):
        return sum(COST.overhead + len(g) * COST.row(max(rows[i].total for i in g)) for g in plan)

    def consecutive(items):
        for cuts in itertools.product([0, 1], repeat=len(items) - 1):
            plan, group = [], [items[0]]
            for item, cut in zip(items[1:], cuts, strict=True):
                plan, group = ([*plan, group], [item]) if cut else (plan, [*group, item])
            yield [*plan, group]

    order = sorted(range(6), key=lambda i: -rows[i].total)
    assert price(groups) == pytest.approx(min(price(plan) for plan in consecutive(order)))


@pytest.mark.parametrize("plan", [lambda n, budget: padded_groups(n, COST, budget), packed_groups])
def test_the_token_budget_holds_except_for_a_single_longer_row(plan):
    rows = lengths()
    packed = plan is packed_groups
    for group in plan(rows, 100):
        assert len(group) == 1 or processed_tokens(rows, [group], packed=packed) <= 100
    assert len(packed_groups(rows)) == 1


def test_exactly_keeps_rows_and_reaches_the_count():
    groups = exactly([[0, 1, 2, 3], [4]], 4)
    assert sorted(itertools.chain(*groups)) == [0, 1, 2, 3, 4] and len(groups) == 4
    assert exactly([[0]], 3) == [[0], [], []]
    assert exactly([], 1) == [[]]


# Numbers


def padded_batch(rows):
    """Random rows in TRL's layout: prompts padded on the left, completions on the right; garbage in the padding."""
    generator = torch.Generator().manual_seed(3)
    prompts = max(n.prompt for n in rows)
    width = max(n.completion for n in rows)
    ids = torch.randint(6, 64, (len(rows), prompts + width), generator=generator)
    column = torch.arange(prompts + width)
    mask = torch.stack([(column >= prompts - n.prompt) & (column < prompts + n.completion) for n in rows])
    return ids, mask.long(), width


def plain_scores(model, ids, mask, width):
    """Row by row, through the logits; `(B, C)` with 0 elsewhere."""
    log_probs, entropies = torch.zeros(len(ids), width), torch.zeros(len(ids), width)
    parts = []
    for i, row in enumerate(ids):
        tokens = row[mask[i].bool()]
        completion = int(mask[i, -width:].sum())
        if not completion:
            continue
        log_softmax = torch.log_softmax(model(tokens[None]).logits[0, -completion - 1 : -1], -1)
        log_probs[i, :completion] = log_softmax.gather(1, tokens[-completion:, None])[:, 0].detach()
        entropies[i, :completion] = -(log_softmax.exp() * log_softmax).sum(-1).detach()
        parts.append(log_softmax.gather(1, tokens[-completion:, None]).sum())
    return log_probs, entropies, sum(parts)


ROWS = [RowLength(5, 9), RowLength(1, 1), RowLength(7, 0), RowLength(3, 20), RowLength(6, 19), RowLength(2, 4)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [None, 30])
def test_scores_and_gradients_equal_plain_logits(attention, packed, budget):
    model = tiny.model(attn_implementation=attention)
    ids, mask, width = padded_batch(ROWS)
    expected_log_probs, expected_entropies, total = plain_scores(model, ids, mask, width)
    model.zero_grad()
    total.backward()
    expected_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    rows = Rows(ids, width, row_lengths(mask, width))
    assert rows.lengths == ROWS
    groups = packed_groups(ROWS, budget) if packed else padded_groups(ROWS, COST, budget)
    scores = score(model, rows, [*groups, []], packed=packed, entropy=True)
    torch.testing.assert_close(scores.log_probs, expected_log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropies, expected_entropies, rtol=1e-5, atol=1e-5)
    scores.log_probs.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_grads[name], rtol=1e-4, atol=1e-5, msg=name)


def test_only_labelled_positions_go_through_the_head():
    model = tiny.model()
    ids, _, width = padded_batch(ROWS)
    add_fused_lm_head(model)
    seen = []
    from trl.trainer import utils

    original = utils._ChunkedLogProbFunction.apply
    try:
        utils._ChunkedLogProbFunction.apply = lambda hidden, *args: seen.append(len(hidden)) or original(hidden, *args)
        score(model, Rows(ids, width, ROWS), padded_groups(ROWS, COST))
    finally:
        del utils._ChunkedLogProbFunction.apply
    assert sum(seen) == sum(n.completion for n in ROWS)


def test_nothing_to_score_is_zero_and_attached_to_the_graph():
    model = tiny.model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    rows = [RowLength(4, 0), RowLength(2, 0)]
    ids = torch.randint(6, 64, (2, 9))
    scores = score(model, Rows(ids, 5, rows), [[]], entropy=True)
    assert not scores.log_probs.any() and scores.log_probs.shape == (2, 5)
    scores.log_probs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("attention", "layer_types", "asked", "layout"),
    [
        ("sdpa", None, "auto", "grouped"),
        ("eager", None, "auto", "grouped"),
        ("flash_attention_2", None, "auto", "packed"),
        ("kernels-community/flash-attn3", None, "auto", "packed"),
        ("flash_attention_2", ["full_attention", "linear_attention"], "auto", "grouped"),
        ("sdpa", None, "packed", "packed"),
        ("flash_attention_2", None, "padded", "padded"),
    ],
)
def test_the_layout_follows_the_attention(attention, layer_types, asked, layout):
    model = tiny.model()
    model.config._attn_implementation_internal = attention
    model.config.layer_types = layer_types
    chosen, reason = choose_layout(asked, model, images=False)
    assert chosen == layout and chosen in LAYOUTS
    assert (reason is not None) == (layer_types is not None)


def test_layouts_that_would_be_wrong_are_refused():
    model = tiny.model()
    model.config.layer_types = ["mamba", "full_attention"]
    with pytest.raises(ValueError, match="forward_layout='packed' is wrong for Qwen2ForCausalLM"):
        choose_layout("packed", model, images=False)
    with pytest.raises(ValueError, match="forward_layout='grouped' cannot carry images"):
        choose_layout("grouped", tiny.model(), images=True)
    assert choose_layout("auto", tiny.model(), images=True)[0] == "padded"
