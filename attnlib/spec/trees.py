"""The spec of a layer over trees of speculative tokens."""

from __future__ import annotations

from attnlib.errors import ContractError
from attnlib.score_functions.trees import speculative_tree
from attnlib.spec.attention_spec import AttentionSpec
from attnlib.spec.kinds import MaskKind

__all__ = ["tree_spec"]


def tree_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of a causal layer for batches whose new tokens form trees (M20).

    Its window, chunks and ALiBi become the score function `speculative_tree`, which counts
    positions in the tree. Every batch gives `query_bias` and the batch tensor `tree`
    (`attnlib.score_functions.trees.tree_tensor`); a layer with ALiBi has its slopes as the layer
    tensor `slope`. Caches and results for a chain of tokens are those of `spec`.

    Args:
        spec: of a causal decoder.

    Raises:
        ContractError: another mask, or a score function that counts rows: write one over
            `attnlib.score_functions.trees.tree_position`.
    """
    if spec.mask_kind is not MaskKind.CAUSAL:
        raise ContractError(
            f"mask_kind={spec.mask_kind.value}: a tree of tokens is verified by a causal layer",
            rule="M20",
        )
    before, chunk = spec.visible_window.left, spec.attention_chunk_size
    tree = spec.score_function
    if before is not None or chunk is not None or spec.has_alibi:
        if tree is not None:
            raise ContractError(
                f"score_function={tree} with a window, chunks or ALiBi: a layer has one score "
                "function, so write one for all of them over "
                "attnlib.score_functions.trees.tree_position",
                rule="M20",
            )
        tree = speculative_tree(None if before is None else before + 1, chunk, spec.has_alibi)
    return spec.replace(
        mask_kind=MaskKind.QUERY_BIAS,
        sliding_window=None,
        window=None,
        attention_chunk_size=None,
        has_alibi=False,
        score_function=tree,
    )
