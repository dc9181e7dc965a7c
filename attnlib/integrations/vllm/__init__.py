"""attnlib as an attention backend of vLLM.

    vllm serve MODEL --attention-backend ATTNLIB     # vLLM 0.33
    vllm serve MODEL --attention-backend CUSTOM      # vLLM 0.26

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its
processes. Inside vLLM, ATTNLIB_BACKEND selects attnlib's backend as it does elsewhere.

`backend` answers vLLM's questions about support, `layer_spec` translates its arguments to an
`AttentionSpec`, and `batch` its batches. `impl` is the attention of one layer, `builder` the
metadata of one batch, `masks` the masks that depend on the batch, `kv_cache` views vLLM's memory as
a paged cache, `warm` compiles kernels before vLLM serves, `context_parallel` computes attention
over a cache that is distributed over the ranks of a decode context parallel group. `mla_backend`,
`mla_impl` and `mla_builder` are the same for multi-head latent attention, `mla_sparse` for that
over selected keys. `page_backend` has a class per format of pages with scales, and `format_names`
their names; `registered` chooses among the classes, and `cpu` serves vLLM's own CPU platform.
`state_layers` are vLLM's layers with recurrent states, `state_pages` their slots in vLLM's pages,
`state_metadata` their batches. Only `register` can be imported without vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

_BACKEND = "attnlib.integrations.vllm.registered.Backend"


def register() -> None:
    """Register attnlib with vLLM: as ATTNLIB where vLLM accepts new names, else as CUSTOM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from attnlib import env
    from attnlib.integrations.vllm import cpu
    from attnlib.integrations.vllm.format_names import register_formats
    from attnlib.integrations.vllm.names import backend_name

    name = backend_name()
    known = AttentionBackendEnum.__members__
    register_backend(known[name] if name in known else name, _BACKEND)
    if name != "CUSTOM" and not known["CUSTOM"].is_overridden():
        register_backend(known["CUSTOM"], f"{_BACKEND.rpartition('.')[0]}.Custom")
    # A worker that is spawned reads its configuration before vLLM calls `register` there.
    known[name].__reduce_ex__ = lambda protocol: (_registered_name, ())
    cpu.register()
    register_formats()
    if env.read("ATTNLIB_VLLM_STATES"):
        from attnlib.integrations.vllm import state_layers

        state_layers.register()


def _registered_name() -> Any:
    """vLLM's name for attnlib, registered in this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from attnlib.integrations.vllm.names import backend_name

    if backend_name() not in AttentionBackendEnum.__members__:
        register()
    return AttentionBackendEnum[backend_name()]
