"""How products of queries and keys become base-2 logits, as one value."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.ops.triton.hopper.kernels.compat import Value, aggregate
from attnlib.ops.triton.hopper.kernels.softmax import score_factor, transform_scores

__all__ = ["Logits", "logits_of"]


@aggregate
class Logits:
    """How products of queries and keys become base-2 logits.

    Fields:
        factor: of products, see `softmax.score_factor`.
        soft_cap: read with HAS_CAP.
    """

    factor: Value
    soft_cap: Value
    HAS_CAP: gl.constexpr

    @gluon.jit
    def transform(self, scores):
        """Return base-2 logits with a soft cap, and the products unchanged without one."""
        return transform_scores(scores, self.factor, self.soft_cap, self.HAS_CAP)

    @gluon.jit
    def weight_factor(self):
        """Return the factor of transformed scores in the exponents of weights."""
        factor = self.factor
        if self.HAS_CAP:
            factor = 1.0
        return factor


@gluon.jit
def logits_of(scale, soft_cap, HAS_CAP: gl.constexpr):
    """Return the `Logits` of a layer."""
    return Logits(score_factor(scale, soft_cap, HAS_CAP), soft_cap, HAS_CAP)
