"""FlashInfer's wrappers of paged attention and its functions around them, on the backend that
attnlib selects.

`import attnlib.compat.flashinfer as flashinfer` in place of `import flashinfer` is enough for the
names below. Log-sum-exps are base 2, as FlashInfer's.
"""

from attnlib.compat.flashinfer.append import (
    append_paged_kv_cache,
    get_batch_indices_positions,
)
from attnlib.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from attnlib.compat.flashinfer.decode_graph import CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from attnlib.compat.flashinfer.merge import merge_state, merge_state_in_place, merge_states
from attnlib.compat.flashinfer.page import get_seq_lens
from attnlib.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
