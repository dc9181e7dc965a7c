"""`PagedModel` over one pool for all groups of layers, and with layers that share keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import attnlib
from attnlib.cache.hybrid_allocator import HybridBlockAllocator, SequenceBlocks
from attnlib.errors import ContractError
from attnlib.integrations.transformers.paged_model import PagedModel
from attnlib.metadata.groups import group_batches
from tests.integrations.tiny_models import (
    WINDOW,
    decoder,
    deepseek_v3,
    gemma3n,
    gemma4_with_shared_layers,
    prompts,
    randomized,
)
from tests.integrations.transformers.test_state_mixers import built, skip_in_older_releases
from tests.integrations.transformers.test_state_mixers import pytestmark as has_state_functions

MODELS = {
    "gpt_oss": lambda: decoder("gpt_oss"),
    "gemma3": lambda: decoder("gemma3"),
    "gemma3n": gemma3n,
    "gemma4": gemma4_with_shared_layers,
    "latents": lambda: randomized(deepseek_v3()),
}
CHUNK = 6


class Engine:
    """Requests in one batch: chunked prefill, greedy decodes, blocks freed behind the windows."""

    def __init__(self, model: Any, num_blocks: int = 96, backend: str = "torch") -> None:
        self.paged = PagedModel(
            model, num_blocks=num_blocks, block_size=4, backend=backend, hybrid=True
        )
        self.allocator = HybridBlockAllocator(self.paged.groups, num_blocks)
        self.used: list[dict[str, int]] = []  # blocks of each group, for each step
        self.reused = 0
        self.poison = False

    def generate(self, sequences: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Append `new_tokens` tokens to each sequence."""
        tokens = [list(sequence) for sequence in sequences]
        ends = [len(sequence) + new_tokens for sequence in tokens]
        held = [self.allocator.start(sequence) for sequence in tokens]
        self.reused = sum(one.num_computed for one in held)
        with self.paged.attached():
            while any(len(t) < end for t, end in zip(tokens, ends, strict=True)):
                self._step(tokens, held, ends)
        for one in held:
            self.allocator.release(one)
        return [t[-new_tokens:] for t in tokens]

    def _step(self, tokens: list[list[int]], held: list[SequenceBlocks], ends: list[int]) -> None:
        counts = [
            min(len(t) - one.num_computed, CHUNK) if len(t) < end else 0
            for t, one, end in zip(tokens, held, ends, strict=True)
        ]
        lens = [one.num_computed + count for one, count in zip(held, counts, strict=True)]
        for one, length in zip(held, lens, strict=True):
            self.allocator.grow(one, length)
        used = self.allocator.num_used_blocks
        self.used.append({name: used(name) for name in self.allocator.groups})
        device = next(self.paged.model.parameters()).device
        batches = group_batches(self.allocator, held, counts, device)
        spans = [range(length - count, length) for length, count in zip(lens, counts, strict=True)]
        ids = [t[place] for t, span in zip(tokens, spans, strict=True) for place in span]
        sampling = [n for n, (t, end) in enumerate(zip(tokens, lens, strict=True))
                    if counts[n] and end == len(t)]  # fmt: skip
        ends_of = torch.tensor(counts).cumsum(0) - 1
        logits = self.paged.step(
            torch.tensor(ids, device=device),
            torch.tensor([p for span in spans for p in span], device=device), batches,
            ends_of[sampling],
        )  # fmt: skip
        for one, t, length in zip(held, tokens, lens, strict=True):
            self.allocator.advance(one, t[:length])
        # P5, P12: what is free may hold anything. Cached prefixes are in use until the end.
        in_use = {0, *(block for one in held for ids in one.blocks.values() for block in ids)}
        if self.poison:
            free = [n for n in range(self.paged.num_blocks) if n not in in_use]
            self.paged.pool._storage[free] = 0xFF
        for row, number in enumerate(sampling):
            tokens[number].append(int(logits[row].argmax()))


def _expected(model: Any, sequences: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens by eager attention over the whole sequence, without a cache."""
    model.set_attn_implementation("eager")
    device = next(model.parameters()).device
    found = []
    for sequence in sequences:
        ids = list(sequence)
        for _ in range(new_tokens):
            with torch.no_grad():
                ids.append(
                    int(
                        model(torch.tensor([ids], device=device), use_cache=False)
                        .logits[0, -1]
                        .argmax()
                    )
                )
        found.append(ids[len(sequence) :])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_eager_attention(name: str) -> None:
    """P12: over a pool, with freed blocks and reused prefixes. Two prompts have a prefix."""
    model = MODELS[name]()
    common = prompts(19, seed=3)[0]
    sequences = [common + prompt for prompt in prompts(3, 9)] + prompts(2)
    engine = Engine(model)
    assert engine.generate(sequences, 8) == _expected(model, sequences, 8)
    assert engine.generate(sequences[:1], 2) == _expected(model, sequences[:1], 2)
    assert engine.reused > 0
    assert engine.allocator.num_free_blocks == 95


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3n"])
def test_windowed_groups_are_bounded(name: str) -> None:
    """Blocks of the window and of one chunk, however long the sequence grows; full ones grow."""
    model = MODELS[name]()
    engine = Engine(model)
    sequence = prompts(12, seed=5)[0]
    engine.allocator.pool.prefix_caching = False
    engine.poison = True
    assert engine.generate([sequence], 48) == _expected(model, [sequence], 48)
    window = f"window {WINDOW}"
    size, full = (engine.paged.groups[group].block_size for group in (window, "full"))
    used = engine.used
    bound = -(-(WINDOW - 1 + CHUNK) // size) + 1
    assert all(0 < held[window] <= bound for held in used), used
    assert used[-1][window] <= -(-WINDOW // size) + 1
    assert [held["full"] for held in used] == [
        -(-min(n, 59) // full) for n in (CHUNK, *range(12, 60))
    ]


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("hybrid", [True, False])
def test_shared_layers_compute_the_needed_rows_only(name: str, hybrid: bool) -> None:
    """P8: of a prefill one row per request; the layers before them all rows. They own no cache."""
    model = MODELS[name]()
    paged = PagedModel(model, num_blocks=32, block_size=4, backend="torch", hybrid=hybrid)
    paged.prepare()
    layers = list(model.model.layers)
    rows: list[list[int]] = [[] for _ in layers]
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(
            lambda _, args, number=number: rows[number].append(args[0].shape[-2])
        )
    sequences = prompts(7, 11)
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(length) for length in lengths])
    sizes = {name: group.block_size for name, group in paged.groups.items()} or {"": 4}
    batches = {
        group: attnlib.CommonAttentionMetadata.from_lengths(
            lengths, lengths, [[1, 2], [3, 4, 5]], size, "cpu"
        )
        for group, size in sizes.items()
    }
    if hybrid:  # blocks belong to one group at a time
        batches = {
            group: attnlib.CommonAttentionMetadata.from_lengths(
                lengths, lengths, [[1 + 6 * n, 2 + 6 * n], [3 + 6 * n, 4 + 6 * n, 5 + 6 * n]],
                size, "cpu",
            )
            for n, (group, size) in enumerate(sizes.items())
        }  # fmt: skip
    batch: Any = batches if hybrid else batches[""]
    with paged.attached():
        whole = paged.step(tokens, positions, batch)
        last = paged.step(tokens, positions, batch, torch.tensor([6, 17]))
        inner = paged.step(tokens, positions, batch, torch.tensor([3, 5]))
        none = paged.step(tokens, positions, batch, torch.tensor([], dtype=torch.int64))
    owners = len(layers) - 2
    assert rows[:owners] == [[18, 18, 18, 18]] * owners
    assert rows[owners:] == [[18, 2, 3, 1]] * 2
    torch.testing.assert_close(last, whole[[6, 17]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(inner, whole[[3, 5]], rtol=1e-4, atol=1e-4)
    assert none.shape[0] == 0
    found = paged.layers()
    assert len({id(cache) for _, cache in found}) == owners
    assert [layer.writes for layer, _ in found] == [True] * owners + [False] * 2
    model.set_attn_implementation("eager")
    for start, sequence in zip((0, 7), sequences, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([sequence]), use_cache=False).logits[0]
        torch.testing.assert_close(
            whole[start : start + len(sequence)], wanted, rtol=1e-3, atol=1e-3
        )


def test_groups_have_the_layers_with_keys_of_their_own() -> None:
    paged = PagedModel(gemma3n(), num_blocks=8, block_size=4, backend="torch", hybrid=True)
    groups = paged.groups
    assert {name: group.num_layers for name, group in groups.items()} == {
        f"window {WINDOW}": 3, "full": 1
    }  # fmt: skip
    assert [groups[name].block_size for name in groups] == [4, 8]
    assert paged.pool is not None and paged.cache_bytes == paged.pool.nbytes


@pytest.mark.slow
def test_through_triton() -> None:
    """Strided caches of a pool, null blocks and shared layers in the interpreter."""
    model = gemma3n()
    sequences = prompts(9)
    engine = Engine(model, backend="triton")
    assert engine.generate(sequences, 4) == _expected(model, sequences, 4)
    assert {layer.backend.get_name() for layer, _ in engine.paged.layers()} == {"triton"}


def test_values_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of values accept null blocks and requests without needed rows."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    model, sequences = gemma3n(), prompts(17, 3)
    assert Engine(model).generate(sequences, 3) == _expected(model, sequences, 3)


@pytest.mark.parametrize(
    ("tokens", "positions", "rows", "message"),
    [
        (0, 0, None, "the batch has 2 tokens: pass each of them"),
        (1, 1, None, r"input_ids has shape \[1\], and the batch has 2 tokens"),
        (2, 1, None, r"position_ids has shape \[1\]; it must be \[2\]"),
        (2, 2, [0, 2], "rows has 2, and the step has 2 tokens"),
        (2, 2, [-3], "rows has -3"),
    ],
)
def test_the_tensors_of_a_step_are_those_of_its_batch(
    tokens: int, positions: int, rows: list[int] | None, message: str
) -> None:
    batch = attnlib.CommonAttentionMetadata.from_lengths([2], [2], [[1]], 4, "cpu")
    paged = PagedModel(decoder("llama"), num_blocks=8, block_size=4)
    ids, given = (
        torch.zeros(tokens, dtype=torch.int64),
        None if rows is None else torch.tensor(rows),
    )
    with paged.attached(), pytest.raises(ContractError, match=message):
        paged.step(ids, torch.arange(positions), batch, given)


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "rows"])
def test_lists_are_no_tensors_of_a_step(name: str) -> None:
    batch = attnlib.CommonAttentionMetadata.from_lengths([2], [2], [[1]], 4, "cpu")
    paged = PagedModel(decoder("llama"), num_blocks=8, block_size=4)
    given: dict[str, Any] = {"input_ids": torch.arange(2), "position_ids": torch.arange(2)}
    given[name] = [0, 1]
    with paged.attached(), pytest.raises(ContractError, match=f"{name} is of type list"):
        paged.step(batch=batch, **given)


def test_a_step_needs_the_batches_of_all_groups() -> None:
    batch = attnlib.CommonAttentionMetadata.from_lengths([1], [1], [[1]], 4, "cpu")
    token = torch.zeros(1, dtype=torch.int64)
    hybrid = PagedModel(decoder("gpt_oss"), num_blocks=8, block_size=4, hybrid=True)
    plain = PagedModel(decoder("llama"), num_blocks=8, block_size=4)
    with hybrid.attached(), pytest.raises(ContractError, match="pass one batch per group"):
        hybrid.step(token, token, batch)
    with hybrid.attached(), pytest.raises(ContractError, match="has batches for full, the model"):
        hybrid.step(token, token, {"full": batch})
    with hybrid.attached(), pytest.raises(ContractError, match="batch is a list; it must be"):
        hybrid.step(token, token, [batch])
    with plain.attached(), pytest.raises(ContractError, match="is not hybrid"):
        plain.step(token, token, {"full": batch})


def test_latents_are_blocks_of_the_pool() -> None:
    """P10: in place of the keys and values of every head, unless the caller wants these."""
    sizes = {}
    for latents in (True, False):
        paged = PagedModel(
            randomized(deepseek_v3()), num_blocks=8, block_size=4, hybrid=True, latents=latents
        )
        (group,) = paged.groups.values()
        assert group.spec.use_mla is latents and group.num_layers == 2
        assert all(layer.spec == group.spec for layer, _ in paged.layers())
        sizes[latents] = group.bytes_per_token
        if latents:
            assert paged.expanded_cache_bytes > 2 * paged.cache_bytes
    assert sizes[False] > 2 * sizes[True]
    model = randomized(deepseek_v3())
    separate = {"num_blocks": 8, "hybrid": True, "kv_cache_dtype": "int8_per_token_head"}
    assert not PagedModel(model, **separate).latents.modules
    with pytest.raises(ContractError, match="kv_cache_dtype='int9' is not known"):
        PagedModel(model, **{**separate, "kv_cache_dtype": "int9"})


@has_state_functions
def test_blocks_beside_states_have_pages_with_scales() -> None:
    """P13: the logits are those of blocks of one page."""
    skip_in_older_releases("qwen3_next")
    tokens, found = torch.arange(31) * 7 % 50, {}
    for size in (4, 80):
        paged = PagedModel(
            built("qwen3_next"), num_blocks=12, block_size=size, backend="torch", hybrid=True,
            kv_cache_dtype="int8_per_token_head",
        )  # fmt: skip
        group = paged.groups["full"]
        assert group.block_size == 80 and group.page_size == (16 if size == 4 else None)
        assert all(
            layer.spec.block_size == (16 if size == 4 else 80) for layer, _ in paged.layers()
        )
        blocks, logits = HybridBlockAllocator(paged.groups, 12), []
        one = blocks.start(tokens.tolist())
        with paged.attached():
            for first, last in ((0, 20), (20, 25), (25, 31)):
                blocks.grow(one, last)
                batch = group_batches(blocks, [one], [last - first], "cpu")
                logits.append(paged.step(tokens[first:last], torch.arange(first, last), batch))
                blocks.advance(one, tokens[:last].tolist())
        found[size] = torch.cat(logits)
    torch.testing.assert_close(found[4], found[80])


@has_state_functions
def test_a_step_over_states_needs_slots_of_each_layer() -> None:
    model = built("lfm2")
    paged = PagedModel(model, num_blocks=12, block_size=4, backend="torch", hybrid=True)
    blocks = HybridBlockAllocator(paged.groups, 12)
    one = blocks.start([3, 4])
    blocks.grow(one, 2)
    given = group_batches(blocks, [one], [2], "cpu")
    tokens = torch.tensor([3, 4])
    other = group_batches(blocks, [one], [1], "cpu")
    for changed, message in (
        ({"states": other["states"]}, "of group states has 1 requests with 1 tokens, that of full"),
        ({"states": given["full"]}, "group states needs slots of 2 .* has a block table"),
        ({"states": replace(given["states"], slots=())}, "batch has slots of 0 state layers"),
        ({"full": given["states"]}, "full needs a block table, and its batch has slots of 2"),
    ):
        with paged.attached(), pytest.raises(ContractError, match=message):
            paged.step(tokens, torch.arange(2), {**given, **changed})
    with paged.attached():
        assert paged.step(tokens, torch.arange(2), given).isfinite().all()
