"""Decoder and encoder models of transformers on attnlib, by name.

    import attnlib.integrations.transformers as integration
    integration.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnlib")
    model.generate(**batch)               # padded batches, without copies of keys and values
    model.generate_batch(prompts)         # continuous batching over the paged cache

transformers calls the attention function once per layer; the integration turns the call into one of
an attnlib `Attention` layer. `registration` registers the names and `attention` is the attention
function; `traced` and `opaque` are both under torch.compile. `masks`, `mask_tensor`,
`described_mask`, `mask_values`, `step_mask` and `patterns` describe what is visible (`packing`: in
packed rows), `mask_kinds` and `step_batches` how a mask is served.
`plain` (with `prefill` and `decode` on a CPU, and `decode_on_device`), `continuous`, `dense`,
`selected` and `two_streams` are the ways to compute attention. `pages` and `storage` view the
memory of transformers as a paged cache, `layers` and `batch_plan` hold what belongs to a module and
to a step. `paged_model` runs a model over attnlib's own paged caches: `discovery` finds its layers,
`paged_layers` holds them, `paged_step` is one step, `paged_forward` its forward, `paged_latents`
holds layers over latents, `shared_layers` selects the tokens for layers without keys of their own,
`decode_graphs` captures decodes over `decode_buffers`, and `experts` chooses how experts are
computed. Requires transformers 5.17 or later.
"""

from __future__ import annotations

from attnlib.integrations.transformers.registration import NAME, register, unregister

__all__ = ["NAME", "register", "unregister"]
