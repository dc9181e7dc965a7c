"""Tiny random models from the default configuration of a model type."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import transformers as hf
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.integrations.transformers_sweep.overrides import OVERRIDES, START
from tests.integrations.transformers_sweep.sizes import (
    HEAD_DIM,
    HIDDEN,
    INTEGERS,
    LARGEST,
    WINDOW,
)

__all__ = ["build", "get", "tiny_config"]

_FIRST_SPECIAL = 100
_COUNTS = ("num_key_value_heads", "num_attention_heads", "num_hidden_layers")
"""Fields whose default a configuration around this one may set."""

_REQUIRED = {"head_dim": HEAD_DIM, "num_key_value_heads": 2, "num_experts_per_tok": 2}
"""Fields that some configurations declare as None and their models need."""


class _Shrinker:
    """Shrinks a tree of configurations; token ids stay distinct and equal in all of them."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}

    def fields(self, config: PreTrainedConfig) -> dict[str, Any]:
        """Keyword arguments that create the tiny configuration."""
        found: dict[str, Any] = {}
        declared = {field.name: field for field in dataclasses.fields(config)}
        base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        for name in [*declared, *config.sub_configs]:
            value = get(config, name)
            if name in base - {"pad_token_id", "bos_token_id", "eos_token_id"} or value is None:
                continue
            default = declared[name].default if name in declared else dataclasses.MISSING
            if name == "image_grid_pinpoints" or (default is None and name not in _COUNTS):
                # The configuration computes the value from others.
                if not isinstance(value, (PreTrainedConfig, list, tuple)):
                    continue
            changed = self._value(name, value)
            if isinstance(value, PreTrainedConfig) or changed not in (value, default):
                found[name] = changed
            elif isinstance(value, int) and value != default:  # set by the configuration around
                found[name] = changed
        self._layers(config, found)
        self._rope(config, found)
        self._images(config, found)
        if "sliding_window" in declared and "use_sliding_window" in declared:
            found.update(use_sliding_window=True, sliding_window=WINDOW)
        if isinstance(get(config, "embed_dim"), int) and get(config, "depths") is None:
            found["embed_dim"] = HIDDEN
        if get(config, "num_key_value_heads") == get(config, "num_attention_heads"):
            found.pop("num_key_value_heads", None)
            if get(config, "num_attention_heads") and "num_key_value_heads" in declared:
                found["num_key_value_heads"] = found.get("num_attention_heads", 4)
        _merge(found, OVERRIDES.get(config.model_type, {}))
        return found

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, PreTrainedConfig):
            named = {"model_type": value.model_type} if value.model_type else {}
            return named | self.fields(value)
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            if _is_token(name):
                return self._token(value)
            limit = INTEGERS.get(name)
            return value if limit is None else min(value, limit)
        if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            if _is_token(name):
                return [self._token(v) for v in value]
            if name == "depths":
                return [1] * len(value)
        return value

    def _token(self, value: int) -> int:
        if value < _FIRST_SPECIAL:
            return value
        return self.ids.setdefault(value, _FIRST_SPECIAL + len(self.ids))

    def _layers(self, config: PreTrainedConfig, found: dict[str, Any]) -> None:
        """One layer of each type, and at least two."""
        declared = {field.name for field in dataclasses.fields(config)}
        for name in ("layer_types", "layers_block_type", "block_types", "attn_layers"):
            types = get(config, name)
            if not isinstance(types, (list, tuple)) or not types or name not in declared:
                continue
            kinds = list(dict.fromkeys(types))
            if kinds == ["full_attention"] and "sliding_window" in declared:
                kinds = ["sliding_attention", "full_attention"]
                found["sliding_window"] = WINDOW
            kinds = kinds * 2 if len(kinds) == 1 else kinds
            found[name] = kinds
            for count in ("num_hidden_layers", "n_layer", "num_layers"):
                if hasattr(config, count):
                    found[count] = len(kinds)
        for name in ("mlp_layer_types", "layer_ffn_types"):
            types = get(config, name)
            if isinstance(types, (list, tuple)) and types and name in declared:
                count = found.get("num_hidden_layers", 2)
                kinds = list(dict.fromkeys(types))
                found[name] = (kinds * count)[:count]

    def _rope(self, config: PreTrainedConfig, found: dict[str, Any]) -> None:
        """Sections of rotary embeddings that add up to half of the tiny head size."""
        rope = get(config, "rope_parameters")
        if not isinstance(rope, dict):
            return
        known = "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())
        head = found.get("head_dim") or HEAD_DIM
        rope = found["rope_parameters"] = copy.deepcopy(rope)
        for part in [rope, *[value for value in rope.values() if isinstance(value, dict)]]:
            if "mrope_section" in part or (known and "rope_theta" in part):
                half = int(head * part.get("partial_rotary_factor", 1.0)) // 2
                part["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]

    def _images(self, config: PreTrainedConfig, found: dict[str, Any]) -> None:
        """Images of 4 x 4 patches; more where stages reduce them. One image has two tiles."""
        tile = found.get("vision_config", {}).get("image_size")
        if get(config, "image_grid_pinpoints") and tile:
            found["image_grid_pinpoints"] = [[tile, 2 * tile], [2 * tile, tile]]
        size, patch = get(config, "image_size"), get(config, "patch_size")
        if isinstance(size, int) and patch is None:
            found["image_size"] = min(size, 64)
        if not isinstance(size, int) or not isinstance(patch, int):
            return
        stages = isinstance(getattr(config, "depths", None), (list, tuple))
        found["image_size"] = min(size, patch * (16 if stages else 4))


def _merge(fields: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(fields.get(name), dict):
            _merge(fields[name], value)
        else:
            fields[name] = value


def _is_token(name: str) -> bool:
    return name.endswith(("token_id", "token_index", "token_ids", "_id", "_index")) and not (
        name.endswith(("layer_index", "ignore_index", "layer_id"))
    )


def tiny_config(model_type: str, class_name: str = "") -> PreTrainedConfig:
    """The tiny configuration of a model type, for a model class."""
    cls = CONFIG_MAPPING[model_type]
    start = START.get(model_type, {})
    fields = {**start, **_Shrinker().fields(cls(**start))}
    _merge(fields, OVERRIDES.get(class_name, {}))
    tiny = cls(**fields)
    for part in _tree(tiny):
        for name, value in _REQUIRED.items():
            if name in vars(part) and get(part, name) is None:
                setattr(part, name, value)
    return tiny


def _tree(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    parts = [config]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            parts += _tree(part)
    return parts


def get(config: PreTrainedConfig, name: str) -> Any:
    """A field; the common value where layers differ, and None where there is none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # a field that differs between layers
        return config._getattr_without_heterogeneous_validation(name)


def build(model_type: str, class_name: str, seed: int = 1) -> Any:
    """A model in evaluation mode, float32, with wide random weights."""
    config, cls = tiny_config(model_type, class_name), getattr(hf, class_name)
    fitting = [part for part in _tree(config) if isinstance(part, cls.config_class or object)]
    config = fitting[0] if fitting else config
    for part in _tree(config):
        part._attn_implementation = "eager"
    with torch.device("meta"):
        try:
            size = sum(
                p.numel()
                for p in cls._from_config(config, attn_implementation="eager").parameters()
            )
        except NotImplementedError:
            size = 0
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    _randomize(model, seed)
    return model.eval()


def _randomize(model: Any, seed: int) -> None:
    """Wide random weights, so that attention is not uniform and greedy tokens do not repeat."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.data = parameter.data.float() + 0.1 * noise
            elif isinstance(module, torch.nn.Embedding):
                parameter.data = 0.7 * noise
            else:
                conv = "Conv" in type(module).__name__ or parameter.dim() > 3
                fan = parameter[0].numel() if conv else min(parameter.shape[-2:])
                parameter.data = noise * (1.4 / max(fan, 1) ** 0.5)
