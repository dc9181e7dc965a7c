"""Slots in vLLM's pages, inside an importable vLLM without an engine; run by
`test_vllm_adapter.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm_adapter import vllm_batch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.state_inputs import StepConstants, update_constants
from attnlib.integrations.vllm.state_metadata import AttnlibStateBuilder
from attnlib.integrations.vllm.state_pages import StateArguments, StatePages

HEADS, SIZE, CHANNELS, PAGES = 2, 8, 48, 6
FIELDS = {
    "num_heads": HEADS, "key_size": SIZE, "value_size": SIZE, "update": "delta",
    "conv_channels": CHANNELS, "conv_width": 3,
}  # fmt: skip


class Owner(torch.nn.Module, MambaBase):
    """What vLLM's layers have."""

    mamba_type = None

    def __init__(self, drafts: int) -> None:
        super().__init__()
        self.prefix, self.num_spec = "layer", drafts

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return torch.float32, torch.float32


class Gated(StatePages, Owner):
    """Whose gates have weights in bfloat16, as those of vLLM's Mamba2 layers."""

    def __init__(self, drafts: int) -> None:
        super().__init__(drafts)
        draw = torch.Generator().manual_seed(2)
        for name in ("A_log", "dt_bias", "D"):
            weight = torch.randn(HEADS, generator=draw).bfloat16()
            setattr(self, name, torch.nn.Parameter(weight, requires_grad=False))

    def state_arguments(self, constants: StepConstants) -> StateArguments:
        generator = torch.Generator().manual_seed(0)
        weights = {"conv_weight": torch.randn(CHANNELS, 3, generator=generator)}
        rate = constants.add(self.A_log, torch._foreach_exp_)
        form = {"gates": "softplus", "rate": rate, "bias": constants.add(self.dt_bias)}
        return {**FIELDS, "has_skip": True}, {**weights, "skip": constants.add(self.D)}, form


class Layer(StatePages, Owner):
    def state_arguments(self, constants: StepConstants) -> StateArguments:
        generator = torch.Generator().manual_seed(0)
        weights = {"conv_weight": torch.randn(CHANNELS, 3, generator=generator)}
        return FIELDS, weights, {"gates": "given"}


@pytest.fixture
def config() -> Any:
    config = VllmConfig()
    config.cache_config.mamba_block_size = 64
    object.__setattr__(config, "model_config", SimpleNamespace(enforce_eager=True))
    with set_current_vllm_config(config):
        yield config


def made(
    config: VllmConfig, drafts: int = 0, kind: type[StatePages] = Layer, name: str = "layer"
) -> Any:
    """A layer over pages that are longer than a slot, and hold NaN."""
    layer = kind(drafts)
    layer.prefix = name
    config.compilation_config.static_forward_context[name] = layer
    shapes, size = layer.get_state_shape(), layer.state_layer.layout.bytes_per_slot
    pages = torch.full((PAGES, size + 64), 255, dtype=torch.uint8)
    half = size // 2
    layer.kv_cache = (pages[:, :half].view(PAGES, *shapes[0]), pages[:, half:size])
    return layer


def steps(config: VllmConfig, layer: Any, divided: list[list[int]], table: torch.Tensor) -> Any:
    """Outputs of the requests of `table` after steps of these tokens."""
    name = layer.prefix
    builder = AttnlibStateBuilder(SimpleNamespace(), [name], config, torch.device("cpu"))
    total = torch.tensor(divided).sum(0).tolist()
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(n, CHANNELS + 2 * HEADS, generator=generator) for n in total]
    done, found = [0] * len(total), [[] for _ in total]
    for lengths in divided:
        rows = torch.cat([x[d : d + n] for x, d, n in zip(inputs, done, lengths, strict=True)])
        x, decay, beta = rows.split([CHANNELS, HEADS, HEADS], dim=1)
        gates = -decay.abs().contiguous(), beta.sigmoid().contiguous()
        done = [d + n for d, n in zip(done, lengths, strict=True)]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        ends, longest = torch.tensor(done, dtype=torch.int32), max(lengths)
        batch = vllm_batch(starts, ends, int(starts[-1]), longest, 64, table, None)
        output = torch.full((len(rows) + 2, HEADS * SIZE), torch.nan)
        padded = [torch.cat([part, part.new_zeros(2, part.shape[1])]) for part in (x, *gates)]
        with set_forward_context({name: builder.build(0, batch)}, config):
            layer.run_step(padded[0], tuple(padded[1:]), output)
        assert (output[len(rows) :] == 0).all()
        for each, part in zip(found, output[: len(rows)].split(lengths), strict=True):
            each.append(part)
    return [torch.cat(each) for each in found]


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_over_pages(config: Any, drafts: int) -> None:
    """Each request in its page, whatever the steps; page 0 and other pages keep their bytes."""
    table = torch.tensor([[4, 9], [2, 9]], dtype=torch.int32)
    layer = made(config, drafts)
    found = steps(config, layer, [[5, 1], [1, 7], [3, 1]], table)
    expected = steps(config, made(config, drafts), [[9, 9]], table)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    pages = layer.kv_cache[0].as_strided((PAGES, 16), (layer.kv_cache[0].stride(0), 1))
    assert (pages[[0, 1, 3, 5]] == 255).all() and not (pages[[2, 4]] == 255).all()


def test_weights_that_are_loaded_in_place_count_from_the_next_step(config: Any) -> None:
    """The first layer of a step computes what all layers need, however weights are written."""
    table = torch.tensor([[4], [2]], dtype=torch.int32)
    layers = [made(config, kind=Gated, name=name) for name in ("first", "second")]
    before = [steps(config, layer, [[3, 1]], table)[0] for layer in layers]
    for number, layer in enumerate(layers):
        for name in ("A_log", "dt_bias", "D"):
            getattr(layer, name).data.add_(1 + number)
        layer.kv_cache[0].as_strided((PAGES, 64), (layer.kv_cache[0].stride(0), 1)).fill_(255)
    after = [steps(config, layer, [[3, 1]], table)[0] for layer in layers]
    for number, (got, was) in enumerate(zip(after, before, strict=True)):
        config.compilation_config.static_forward_context.clear()
        fresh = made(config, kind=Gated)
        for name in ("A_log", "dt_bias", "D"):
            getattr(fresh, name).data.add_(1 + number)
        assert torch.equal(got, steps(config, fresh, [[3, 1]], table)[0])
        assert not torch.allclose(got, was)


def test_a_warm_up_waits_for_the_inputs_of_the_first_run(config: Any) -> None:
    object.__setattr__(config, "model_config", SimpleNamespace(enforce_eager=False))
    layer = made(config)
    AttnlibStateBuilder(SimpleNamespace(), ["layer"], config, torch.device("cpu"))
    layer.group_warmup.run(between_batches=True)  # as a registry that runs early
    assert layer.group_warmup.pending
    steps(config, layer, [[2, 1]], torch.tensor([[4], [2]], dtype=torch.int32))
    assert not layer.group_warmup.pending
    x, gates, output = layer.inputs.zeros(7)
    assert x.shape == (7, CHANNELS) and output.shape == (7, HEADS * SIZE)
    assert x.stride() == (CHANNELS, 1) and [tuple(gate.shape) for gate in gates] == [(7, HEADS)] * 2


def test_constants_need_as_many_launches_for_all_layers_as_for_one() -> None:
    layers = [StepConstants() for _ in range(3)]
    exponents = [layer.add(torch.zeros(2), torch._foreach_exp_) for layer in layers]
    copies = [layer.add(torch.ones(2, dtype=torch.bfloat16)) for layer in layers]
    kept = torch.ones(2)
    assert layers[0].add(kept).data_ptr() == kept.data_ptr()
    update = update_constants(layers)
    with Counted() as counted:
        update()
    assert counted.calls == ["_foreach_copy_", "_foreach_exp_"]
    assert all((tensor == 1).all() for tensor in (*exponents, *copies))


class Counted(TorchDispatchMode):
    """The operations that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_group_takes_the_metadata_of_another_with_its_own_pages(config: Any) -> None:
    made(config)
    first, other = (
        AttnlibStateBuilder(SimpleNamespace(), ["layer"], config, torch.device("cpu"))
        for _ in range(2)
    )
    starts, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 1])
    tables = torch.tensor([[[3], [0]], [[5], [1]]], dtype=torch.int32)
    batch = vllm_batch(starts, lengths.int(), 2, 1, 64, tables[0], None)
    metadata = first.build(0, batch)
    updated = other.update_block_table(metadata, tables[1], torch.zeros(2))
    assert metadata.state_slots.tolist() == [3, -1] and updated.state_slots.tolist() == [5, 1]
    address = metadata.state_slots.data_ptr()
    assert first.build(0, batch).state_slots.data_ptr() == address  # graphs replay with it


def test_a_slot_that_exceeds_a_block_is_refused_with_a_size_that_fits(config: Any) -> None:
    layer, cache = made(config, drafts=3), config.cache_config
    cache.block_size, cache.mamba_page_size_padded = 16, 1024
    with pytest.raises(UnsupportedConfigError, match="--block-size") as caught:
        layer.get_kv_cache_spec(config)
    tokens = int(str(caught.value).split()[-1])
    cache.block_size, cache.mamba_page_size_padded = tokens, tokens * 64
    spec = layer.get_kv_cache_spec(config)
    assert spec.num_speculative_blocks == 0 and spec.page_size_bytes == tokens * 64
    assert sum(map(len, spec.shapes)) == 3 and set(spec.dtypes) == {torch.uint8}


@pytest.mark.parametrize(
    ("drafts", "change", "action"),
    [
        (2, ("cache_config.mamba_cache_mode", "align"), "--no-enable-prefix-caching"),
        (0, ("cache_config.mamba_cache_mode", "all"), "--mamba-cache-mode align"),
        (0, ("kv_transfer_config", object()), "--kv-transfer-config"),
    ],
)
def test_what_reads_pages_in_another_form_is_refused(
    config: Any, drafts: int, change: tuple[str, Any], action: str
) -> None:
    names, value = change[0].split("."), change[1]
    object.__setattr__(config.cache_config if names[1:] else config, names[-1], value)
    with pytest.raises(UnsupportedConfigError, match=f"layer: .*{action}"):
        Layer(drafts)
