"""Parameters of layers at plan time."""

from types import SimpleNamespace

import pytest
import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.metadata.parameters import (
    PerLayerParameters,
    get_per_layer_parameters,
    group_layers,
    infer_global_hyperparameters,
)
from attnlib.spec import AttentionSpec

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4)


def test_layers_that_differ_are_named() -> None:
    def layer(window: int | None, scale: float) -> SimpleNamespace:
        return SimpleNamespace(
            impl=SimpleNamespace(spec=SPEC.replace(sliding_window=window), scale=scale)
        )

    same = get_per_layer_parameters({"a": layer(None, 0.5), "b": layer(None, 0.5)})
    assert infer_global_hyperparameters(same) == PerLayerParameters(-1, None, 0.5, -1)
    mixed = get_per_layer_parameters(
        {"a": layer(None, 0.5), "b": layer(8, 0.5), "c": layer(None, 0.5)}
    )
    assert list(group_layers(mixed).values()) == [["a", "c"], ["b"]]
    with pytest.raises(
        UnsupportedConfigError,
        match=r"layers a \(.*window_left=-1.*\) and b \(.*window_left=7.*\) differ",
    ):
        infer_global_hyperparameters(mixed)
    with pytest.raises(UnsupportedConfigError, match="no attention layers"):
        infer_global_hyperparameters({})
    with pytest.raises(
        UnsupportedConfigError,
        match="layer a runs on SimpleNamespace, but this plan supports only int",
    ):
        get_per_layer_parameters({"a": layer(None, 0.5)}, int)
