"""torch.compile support: one opaque operator, and integer ids for the Python objects that it uses."""
