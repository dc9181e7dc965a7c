"""Scales of the keys and values of a KV head: numbers, or tensors that may hold invalid ones."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.kernels.quant import SCALE_PER_HEAD, SCALE_PER_TOKEN, SCALE_TENSOR

__all__ = [
    "factor_without_keys",
    "is_tensor",
    "load_kv_scale",
    "sums_of_keys",
    "valid_factor",
    "with_key_scale",
]


@gluon.jit
def load_kv_scale(scale, head, KIND: gl.constexpr):
    """Return the scale of a KV head, from a number or a pointer; NaN if out of range (M9)."""
    if KIND == SCALE_PER_HEAD:
        value = gl.load(scale + head)
        value = gl.where((value >= 2.0**-100) & (value <= 2.0**100), value, float("nan"))
    elif KIND == SCALE_TENSOR:
        value = gl.load(scale)
        value = gl.where((value >= 2.0**-100) & (value <= 2.0**100), value, float("nan"))
    elif KIND == SCALE_PER_TOKEN:
        value = 1.0  # scores and weights have those of their tokens
    else:
        value = scale
    return value


@gluon.constexpr_function
def is_tensor(kind):
    """Whether a scale of this kind is read from a tensor, which may hold invalid numbers."""
    return kind == SCALE_TENSOR or kind == SCALE_PER_HEAD


@gluon.jit
def valid_factor(factor):
    """Return a factor of products with keys that includes a scale of a tensor, at least 2 ** -105.

    Masked scores are -inf, and -inf * 0 or -inf * NaN would be NaN. `sums_of_keys` makes NaN of the
    rows that see a key through an invalid scale.
    """
    return gl.where(factor >= 2.0**-105, factor, 2.0**-105)


@gluon.jit
def with_key_scale(scale, k_scale, head, KIND: gl.constexpr):
    """Return a softmax scale times that of the keys of a KV head; `sums_of_keys` must follow."""
    scale = scale * load_kv_scale(k_scale, head, KIND)
    if is_tensor(KIND):
        scale = valid_factor(scale)
    return scale


@gluon.jit
def sums_of_keys(row_sum, without_keys, k_scale, head, KIND: gl.constexpr):
    """Return the sums of weights of rows; NaN for those that see a key through an invalid scale of
    the keys (M9)."""
    if is_tensor(KIND):
        invalid = load_kv_scale(k_scale, head, KIND) * 0.0  # 0 or NaN
        row_sum = gl.where(without_keys, row_sum, row_sum + invalid)
    return row_sum


@gluon.jit
def factor_without_keys(factor, without_keys, KIND: gl.constexpr):
    """Return the factor of the sums of values of each row: 1 for rows without keys, whose sums stay
    0 under an invalid scale (M5)."""
    if is_tensor(KIND):
        factor = gl.where(without_keys, 1.0, factor)
    return factor
