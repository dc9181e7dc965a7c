"""Tiles and segments of the batch-invariant kernel: functions of the layer and the chip only.

No number of a batch enters here, because the bits of a row depend on the shape of its tile.
"""

from __future__ import annotations

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.tiles import (
    Tile,
    next_power_of_2,
    shared_bytes,
    split_head_size,
)

__all__ = [
    "choose_invariant_tile",
    "combine_columns",
    "count_segments",
    "invariant_workspace_bytes",
    "segment_keys",
]

_TILES = {
    128: (Tile(64, 64, 8, 3), Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
    256: (Tile(64, 32, 8, 3), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
}
_LARGE = (Tile(16, 32, 8, 2), Tile(16, 32, 8, 1), Tile(16, 16, 8, 2), Tile(16, 16, 8, 1))
"""Tiles by the padded head size, best first. Not measured. With 64 rows, products on Hopper are
asynchronous; larger tiles spill, because a row has two accumulators."""
_INTERPRETED = (Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))

_SEGMENT_KEYS = 512
"""Keys of a segment. Fewer let one request use more multiprocessors; more cost prefills less."""
_INTERPRETED_SEGMENT_KEYS = 64
"""Keys of a segment under the interpreter, so that short test sequences span several segments."""


def segment_keys(limits: DeviceLimits) -> int:
    """Return the keys of a segment, a multiple of the keys of every tile."""
    return _INTERPRETED_SEGMENT_KEYS if _is_interpreter(limits) else _SEGMENT_KEYS


def choose_invariant_tile(shape: LayerShape, limits: DeviceLimits) -> Tile:
    """Return the tile of all decodes and prefills of a layer.

    Args:
        shape: sizes and dtypes of the layer.
        limits: the chip.

    Raises:
        UnsupportedConfigError: even the smallest tile does not fit the chip.
    """
    head_size, head_size_v = shape.head_sizes
    width = max(sum(split_head_size(head_size)), sum(split_head_size(head_size_v)))
    widest = 128 if width <= 128 else 256
    tiles: tuple[Tile, ...] = (
        *(_TILES[widest] if width <= 256 and shape.query_dtype.itemsize < 4 else ()),
        *_LARGE,
    )
    if shape.latent:
        tiles = _LARGE
    if _is_interpreter(limits):
        tiles = _INTERPRETED
    need = 0
    for tile in tiles:
        need = shared_bytes(
            tile,
            *shape.head_sizes,
            *shape.element_bytes,
            limits.products,
            shape.score_tiles,
            latent=shape.latent,
            native_fp8=limits.has_fp8,
        )
        if need <= limits.shared_memory:
            return tile
    raise UnsupportedConfigError(
        f"batch_invariant=True with head sizes {head_size} (keys) and {head_size_v} (values) needs "
        f"{need} bytes of shared memory with the smallest tile, and the chip allows "
        f"{limits.shared_memory}; use a 16-bit dtype or the torch backend",
        backend="triton",
    )


def count_segments(visible: int, window: bool, limits: DeviceLimits) -> int:
    """Return an upper bound of the segments that the keys of one request lie in.

    Args:
        visible: keys that its queries see, an upper bound (`splits.visible_bound`).
        window: whether the first of them may be any key.
        limits: the chip.
    """
    size = segment_keys(limits)
    return max(1, -(-visible // size) + (1 if window and visible > 1 else 0))


def invariant_workspace_bytes(
    num_tokens: int, num_heads: int, head_size_v: int, num_segments: int
) -> int:
    """Return the workspace of a batch-invariant decode in bytes; 0 for a single segment.

    It holds sums of values, maxima and sums of weights in float32, and the number of segments of
    each token.
    """
    if num_segments <= 1:
        return 0
    return 4 * (num_tokens * num_heads * num_segments * (head_size_v + 2) + num_tokens)


def combine_columns(head_size_v: int) -> int:
    """Return the elements of a value that one program of the combine kernel adds."""
    return min(32, next_power_of_2(head_size_v))


def _is_interpreter(limits: DeviceLimits) -> bool:
    return limits.capability == (0, 0) and not limits.is_amd
