"""Every decoder and encoder model of transformers on attnlib, by name.

    import attnlib.integrations.transformers as integration
    integration.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnlib")
    model.generate(**batch)               # padded batches; keys and values are read where transformers keeps them
    model.generate_batch(prompts)         # continuous batching over the paged cache, natively

In comes one call per layer, in transformers' shapes; out goes a call of an attnlib `Attention`. `registration` is the door, `attention` the
function behind it, `masks` and `patterns` say what is visible (`packing`: in packed rows), `plain`, `continuous` and `dense` are the three ways
through, `pages` and `storage` show transformers' memory as a paged cache, `layers` keeps what belongs to a module. transformers 5.17 and later.
"""

from __future__ import annotations

from attnlib.integrations.transformers.registration import NAME, register, unregister

__all__ = ["NAME", "register", "unregister"]
