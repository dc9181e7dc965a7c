"""Attention backends.

Each package has three parts: the declaration (`__init__`: name, capabilities, availability), the
metadata builder (`metadata`) and the per-layer implementation (`impl`). A declaration can be
imported without the kernel package that it needs. `builtin.py` lists the built-in backends;
selection imports them by name.
"""
