"""Inputs of tiny models: found by trying formats until eager attention accepts one.

Text is a batch of three rows of different lengths. Images, audio and time series have many formats;
`candidates` yields those that the arguments of `forward` allow, the simplest first.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.integrations.transformers_sweep.sizes import LENGTH
from tests.integrations.transformers_sweep.tiny import get

__all__ = ["ROWS", "Inputs", "candidates", "fill_images"]

ROWS = (LENGTH, 13, 6)
"""Tokens of the rows of a batch."""

_MOST_FEATURES = 300
"""Image or audio tokens of a row: more take too long."""

_FIRST, _LAST = 5, 90
"""Range of the random tokens: below the special tokens of a tiny configuration."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model.

    Attributes:
        fixed: arguments that do not depend on padding.
        rows: the token rows; empty for a model without text.
        text: name of the token argument.
        mask: name of its padding mask, or None if the model has none.
        per_token: further arguments `[B, T]` that follow the tokens (name -> value of a token).
        images: tokens of the image in each row; 0 for text only.
        note: what the format leaves out, for the table.
    """

    fixed: dict[str, Any] = field(default_factory=dict)
    rows: tuple[tuple[int, ...], ...] = ()
    text: str = "input_ids"
    mask: str | None = "attention_mask"
    per_token: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    images: int = 0
    note: str = ""

    def batch(self, side: str | None) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Arguments of `forward`, and the positions of real tokens `[B, T]` (None without text).

        Args:
            side: "left" or "right" for rows of different lengths with padding, None for rows of
                the shortest length without a mask.
        """
        if not self.rows:
            return dict(self.fixed), None
        rows = [row[: min(map(len, self.rows))] for row in self.rows] if side is None else self.rows
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            where = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
            ids[index, where], mask[index, where] = torch.tensor(row), 1
        batch = {**self.fixed, self.text: ids}
        batch |= {name: make(ids) for name, make in self.per_token.items()}
        if side is not None and self.mask is not None:
            batch[self.mask] = mask
        return batch, mask.bool()


def text_rows(
    model: Any, lengths: tuple[int, ...] = ROWS, seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Random rows."""
    config = model.config.get_text_config(decoder=seed > 0)
    last = min(_LAST, get(config, "vocab_size") or _LAST)
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        tuple(torch.randint(_FIRST, last, (length,), generator=generator).tolist())
        for length in lengths
    )


def candidates(model: Any) -> Iterator[Inputs]:
    """Inputs that the model may accept, those that use more of it first."""
    known = inspect.signature(model.forward).parameters
    required = {
        name for name, parameter in known.items() if parameter.default is parameter.empty
    } - {"kwargs", "args"}
    media = [choice for name in known for choice in _MEDIA.get(name, lambda m: [])(model)]
    extra = _extra(model, known, required)
    if "input_ids" in known:
        rows, mask = text_rows(model), "attention_mask" if "attention_mask" in known else None
        per_token = _per_token(model, known)
        if "decoder_input_ids" in known:
            yield from _pairs(model, known, rows, media, extra)
        if "image_embeds_position_mask" in known:
            marks = (_KOSMOS_IMAGE,) * (get(model.config, "latent_query_num") or 4)
            rows = tuple((*row[:2], *marks, *row[2:]) for row in rows)
        for choice in media:
            yield Inputs({**extra, **choice}, rows, mask=mask, per_token=per_token, images=-1)
        for choice in media:
            yield Inputs({**extra, **choice}, rows, mask=mask, per_token=per_token)
        note = "text only" if media else ""
        yield Inputs(extra, rows, mask=mask, per_token=per_token, note=note)
    elif "decoder_input_ids" in known:
        yield from _pairs(model, known, text_rows(model), media, extra)
    for choice in media:
        yield Inputs({**extra, **choice})


_KOSMOS_IMAGE = 97
"""A token that marks the positions of an image where the configuration declares none."""


def _pairs(
    model: Any, known: Any, rows: Any, media: list[dict[str, Any]], extra: dict[str, Any]
) -> Iterator[Inputs]:
    """Encoder-decoders: the padded rows are those of the encoder, or of the decoder over media."""
    decoder = torch.tensor(text_rows(model, (10, 10, 10), seed=1))
    if model.config.model_type == "dia":
        decoder = decoder[..., None].expand(-1, -1, model.config.decoder_config.num_channels)
    per_token = _per_token(model, known)
    if "input_ids" in known:
        for choice in [*media, {}]:
            fixed = {**extra, **choice, "decoder_input_ids": decoder}
            yield Inputs(fixed, rows, per_token=per_token, images=-1 if choice else 0)
            yield Inputs(fixed, rows, per_token=per_token)
    mask = "decoder_attention_mask" if "decoder_attention_mask" in known else None
    for choice in media:
        yield Inputs({**extra, **choice}, rows, text="decoder_input_ids", mask=mask)


def _per_token(model: Any, known: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    token = image_token(model.config)
    if "mm_token_type_ids" in known:
        found["mm_token_type_ids"] = lambda ids: (ids == token).long()
    if "token_type_ids" in known:
        kinds = get(model.config, "type_vocab_sizes")  # Tapas: one type per column of a table
        found["token_type_ids"] = (
            (lambda ids: (ids == token).long())
            if kinds is None
            else (lambda ids: torch.zeros(*ids.shape, len(kinds), dtype=torch.long))
        )
    if "bbox" in known:
        box = torch.tensor([1, 2, 5, 9])
        box = box / 10 if model.config.model_type == "udop" else box
        found["bbox"] = lambda ids: box.expand(*ids.shape, 4).clone()
    if "image_attention_mask" in known:
        found["image_attention_mask"] = lambda ids: torch.ones(*ids.shape, 1, dtype=torch.long)
    if "image_embeds_position_mask" in known:
        found["image_embeds_position_mask"] = lambda ids: ids == _KOSMOS_IMAGE
    if model.config.model_type == "kyutai_speech_to_text":
        channels = model.config.num_codebooks + 1
        found["input_ids"] = lambda ids: ids[..., None].expand(-1, -1, channels).clone()
    return found


def _extra(model: Any, known: Any, required: set[str]) -> dict[str, Any]:
    """Values of arguments that some models require."""
    made = {name: make(model) for name, make in _EXTRA.items() if name in known}
    return {name: value for name, value in made.items() if value is not None}


def image_token(config: Any) -> int:
    """The id of image tokens; -1 if the configuration declares none."""
    for name in (
        "image_token_id",
        "image_token_index",
        "image_patch_id",
        "media_placeholder_token_id",
    ):
        value = get(config, name)
        if isinstance(value, int):
            return value
    for name in ("audio_token_id", "audio_token_index", "boa_token_id"):
        value = get(config, name)
        if isinstance(value, int):
            return value
    return -1


def fill_images(model: Any, inputs: Inputs) -> Inputs:
    """The inputs with as many image tokens in each row as the model makes features of an image.

    The number is read from the error that the model raises for rows without image tokens.

    Raises:
        Exception: whatever eager attention raises for these inputs.
    """
    token = image_token(model.config)
    if token < 0:
        raise ValueError("the configuration declares no image token")
    batch, _ = inputs.batch(None)
    seen: list[int] = []
    with _recorded_features(model, seen), torch.no_grad():
        try:
            model(**batch)
        except (ValueError, RuntimeError) as error:
            match = re.search(r"features:? (\d+)", str(error))
            if not seen and match is None:
                raise
            seen += [int(match[1])] if match else []
    if not seen:
        raise ValueError("the model ignores images without image tokens")
    rows = len(inputs.rows)
    for features in seen:
        count = features // rows
        if features % rows == 0 and count <= _MOST_FEATURES:
            filled = tuple((*row[:2], *[token] * count, *row[2:]) for row in inputs.rows)
            full = replace(inputs, rows=filled, images=count)
            try:
                with torch.no_grad():
                    model(**full.batch(None)[0])
            except (ValueError, RuntimeError, IndexError):
                continue
            return full
    raise ValueError(f"no row layout fits {seen} features")


class _recorded_features:
    """Records how many features the model tries to place at image tokens."""

    def __init__(self, model: Any, seen: list[int]) -> None:
        self.owners = [m for m in model.modules() if hasattr(type(m), "get_placeholder_mask")]
        self.seen = seen

    def __enter__(self) -> None:
        for owner in self.owners:
            original = owner.get_placeholder_mask
            signature = inspect.signature(original)

            def recording(
                *args: Any, original: Any = original, signature: Any = signature, **kwargs: Any
            ) -> Any:
                bound = signature.bind(*args, **kwargs).arguments
                width = bound["inputs_embeds"].shape[-1]
                for name in ("image_features", "features", "audio_features", "video_features"):
                    if isinstance(bound.get(name), torch.Tensor):
                        self.seen.append(bound[name].numel() // width)
                return original(*args, **kwargs)

            owner.__dict__["get_placeholder_mask"] = recording

    def __exit__(self, *_: object) -> None:
        for owner in self.owners:
            owner.__dict__.pop("get_placeholder_mask", None)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _vision(model: Any) -> Any:
    config = model.config
    for name in ("vision_config", "image_config", "backbone_config", "encoder", "vq_config"):
        part = get(config, name)
        if part is not None and not isinstance(part, (str, dict)):
            return part
    return config


def _size(config: Any) -> int:
    for name in ("image_size", "img_size", "input_size", "crop_size"):
        value = get(config, name)
        if isinstance(value, (list, tuple)):
            value = value[0]
        if isinstance(value, int):
            return value
    return 32


def _images(model: Any) -> list[dict[str, Any]]:
    """Formats of `pixel_values`."""
    known = inspect.signature(model.forward).parameters
    vision, rows = _vision(model), len(ROWS)
    channels = next(
        (
            v
            for n in ("num_channels", "in_channels", "in_chans")
            if isinstance(v := get(vision, n), int)
        ),
        3,
    )
    size, found = _size(vision), []
    patch = get(vision, "patch_size")
    patch = patch[0] if isinstance(patch, (list, tuple)) else patch
    frames = get(vision, "num_frames") or 4
    whole: dict[str, Any] = {}
    if "image_sizes" in known:
        whole["image_sizes"] = torch.tensor([[size, size]] * rows)
    if isinstance(patch, int):
        step = get(vision, "temporal_patch_size") or get(vision, "patch_temporal") or 1
        merge = get(vision, "spatial_merge_size") or 2
        grid = 2 * merge
        flat = channels * patch * patch
        flat_patches = _noise(rows * grid * grid, flat * step)
        for name in ("image_grid_thw", "grid_thw"):
            if name in known:
                grids = {name: torch.tensor([[1, grid, grid]] * rows)}
                more = {"image_merge_sizes": torch.tensor([merge] * rows)}
                found.append(
                    {
                        "pixel_values": flat_patches,
                        **grids,
                        **{k: v for k, v in more.items() if k in known},
                    }
                )
                found.append(
                    {
                        "pixel_values": _noise(rows * grid * grid, channels, patch, patch),
                        **grids,
                        **{k: v for k, v in more.items() if k in known},
                    }
                )
                found.append(
                    {
                        "pixel_values": _noise(rows * grid * grid, channels, step, patch, patch),
                        **grids,
                    }
                )
        rowwise = _noise(rows, grid * grid, flat)
        ys, xs = torch.meshgrid(torch.arange(grid), torch.arange(grid), indexing="ij")
        positions = torch.stack([xs.flatten(), ys.flatten()], -1).expand(rows, -1, 2).clone()
        for name in ("image_position_ids", "pixel_position_ids"):
            if name in known:
                found.append({"pixel_values": rowwise, name: positions})
        shapes = {"spatial_shapes": torch.tensor([[grid, grid]] * rows)}
        if "spatial_shapes" in known:
            ones = torch.ones(rows, grid * grid, dtype=torch.long)
            for name in ("pixel_attention_mask", "attention_mask"):
                if name in known:
                    found.append({"pixel_values": rowwise, name: ones, **shapes})
        if "target_sizes" in known:
            for target in (torch.tensor([[grid, grid]] * rows), torch.tensor([[4, 4]] * rows)):
                strips = _noise(1, channels, patch, rows * int(target[0].prod()) * patch)
                found.append({"pixel_values": strips, "target_sizes": target})
    if "pixel_attention_mask" in known:
        ones = torch.ones(rows, 1, size, size, dtype=torch.long)
        found.append(
            {"pixel_values": _noise(rows, 1, channels, size, size), "pixel_attention_mask": ones}
        )
    if "pixel_mask" in known:
        ones = torch.ones(rows, size, size, dtype=torch.long)
        found.append({"pixel_values": _noise(rows, channels, size, size), "pixel_mask": ones})
    for shape in [
        (rows, channels, size, size),
        (rows, 1, channels, size, size),
        (rows, 2, channels, size, size),
        (rows, 3, channels, size, size),
        (rows, frames, channels, size, size),
        (rows, 1, size, size),
        (rows, channels, 2 * size, 2 * size),
        (rows, channels, 64, 64),
        (rows, channels, 224, 224),
    ]:
        found += [
            {"pixel_values": _noise(*shape), **sizes} for sizes in ([whole, {}] if whole else [{}])
        ]
    return found


def _audio_parts(model: Any) -> list[Any]:
    names = (
        "audio_config",
        "speech_config",
        "encoder_config",
        "speech_encoder_config",
        "encoder",
        "",
    )
    parts = [get(model.config, name) if name else model.config for name in names]
    return [part for part in parts if part is not None and not isinstance(part, (str, dict))]


def _features(model: Any) -> list[dict[str, Any]]:
    """Formats of `input_features`: spectrograms `[B, mel, frames]` and `[B, frames, mel]`."""
    known = inspect.signature(model.forward).parameters
    bins: list[int] = []
    for part in _audio_parts(model):
        for name in (
            "num_mel_bins",
            "feature_size",
            "input_feat_size",
            "input_dim",
            "mel_dim",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "hidden_size",
            "n_mels",
            "mel_bins",
        ):
            value = get(part, name)
            if isinstance(value, int):
                bins += [value, 2 * value] if name == "input_dim" else [value]
    lengths = [
        2 * value
        for part in _audio_parts(model)
        if isinstance(value := get(part, "max_source_positions"), int) and value <= 1500
    ]
    rows, found = len(ROWS), []
    for size, frames in itertools.product(
        dict.fromkeys([*bins, 80, 128]), dict.fromkeys([64, *lengths, 200])
    ):
        for shape, masked in (
            ((rows, size, frames), (rows, frames)),
            ((rows, frames, size), (rows, frames)),
        ):
            ones = torch.ones(*masked, dtype=torch.long)
            masks = {
                name: ones.bool() if name == "input_features_mask" else ones
                for name in ("input_features_mask", "feature_attention_mask")
                if name in known
            }
            lengths_ = (
                {"audio_feature_lengths": torch.tensor([frames] * rows)}
                if "audio_feature_lengths" in known
                else {}
            )
            found.append({"input_features": _noise(*shape), **masks, **lengths_})
            found.append({"input_features": _noise(*shape)})
            found.append({"input_features": _noise(rows, 1, *shape[1:])})
    return found


def _waves(model: Any) -> list[dict[str, Any]]:
    """Formats of `input_values`: samples, or spectrograms."""
    rows = len(ROWS)
    bins = next(
        (v for p in _audio_parts(model) if isinstance(v := get(p, "num_mel_bins"), int)), 80
    )
    config = model.config
    frames = get(config, "max_length")
    frames = frames if isinstance(frames, int) and frames <= 2000 else 64
    return [
        {"input_values": _noise(*shape)}
        for shape in [
            (rows, 4000),
            (rows, 1, 4000),
            (rows, 1, 3840),
            (rows, frames, bins),
            (rows, 64, bins),
        ]
    ]


def _only(name: str, *shapes: tuple[int, ...]) -> Callable[[Any], list[dict[str, Any]]]:
    return lambda model: [{name: _noise(*shape)} for shape in shapes]


_MEDIA: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "pixel_values": _images,
    "input_features": _features,
    "input_values": _waves,
    "hidden_states": lambda model: _hidden_states(model),
    "flattened_patches": lambda model: _patches(model),
    "past_time_features": lambda model: _series(model),
}


def _hidden_states(model: Any) -> list[dict[str, Any]]:
    """Vision transformers of language models: flat patches and grids."""
    known = inspect.signature(model.forward).parameters
    formats = [
        {
            ("hidden_states" if name == "pixel_values" else name): value
            for name, value in choice.items()
        }
        for choice in _images(model)
    ]
    size = get(model.config, "hidden_size") or 64
    plain = [{"hidden_states": _noise(len(ROWS), 16, size)}]
    return [c for c in formats if set(c) <= set(known)] + plain


def _patches(model: Any) -> list[dict[str, Any]]:
    """Flat patches behind their row and column (Pix2Struct, Kosmos-2.5)."""
    width = (get(_vision(model), "patch_embed_hidden_size") or 768) + 2
    patches = _noise(len(ROWS), 16, width)
    patches[..., 0] = torch.arange(16) // 4 + 1
    patches[..., 1] = torch.arange(16) % 4 + 1
    return [{"flattened_patches": patches}]


def _series(model: Any) -> list[dict[str, Any]]:
    """Time series: values, time features and what was observed."""
    config, rows = model.config, len(ROWS)
    past = config.context_length + max(get(config, "lags_sequence") or [0])
    features = config.num_time_features + config.num_dynamic_real_features
    return [
        {
            "past_values": _noise(rows, past),
            "past_time_features": _noise(rows, past, features),
            "past_observed_mask": torch.ones(rows, past),
            "future_values": _noise(rows, config.prediction_length),
            "future_time_features": _noise(rows, config.prediction_length, features),
        }
    ]


_EXTRA: dict[str, Callable[[Any], Any]] = {
    "visual_feats": lambda model: _noise(len(ROWS), 4, get(model.config, "visual_feat_dim") or 64),
    "visual_pos": lambda model: _noise(len(ROWS), 4, get(model.config, "visual_pos_dim") or 4),
    "task_inputs": lambda model: torch.tensor(text_rows(model, (16, 16, 16), seed=3)),
    "qformer_input_ids": lambda model: torch.tensor(text_rows(model, (4, 4, 4), seed=2)),
    "state": lambda model: (
        _noise(len(ROWS), get(model.config, "max_state_dim") or 1)
        if model.config.model_type == "pi0"
        else None
    ),
}
"""Arguments beside text and media."""
