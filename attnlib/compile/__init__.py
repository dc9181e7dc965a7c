"""Support for torch.compile: one opaque operator, and integer ids for its Python objects."""
