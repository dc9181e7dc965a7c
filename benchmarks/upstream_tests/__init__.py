"""Runs FlashAttention's and FlashInfer's own tests against `attnlib.compat`.

The tests are read from a copy that the caller has downloaded; nothing of it is part of this
repository:

    pip download flash-attn --no-binary :all: --no-deps --no-build-isolation
    tar xzf flash_attn-*.tar.gz
    python -m benchmarks.upstream_tests flash_attn --source flash_attn-*/ --sample 100

    git clone --depth 1 https://github.com/flashinfer-ai/flashinfer
    python -m benchmarks.upstream_tests flashinfer --source flashinfer --sample 100

Building the metadata of the flash-attn download needs FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE in the
environment. The tests need `pip install einops`.
"""
