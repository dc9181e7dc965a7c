"""The kernels behind one interface. Each backend is a folder with the same three rooms: a card, its
metadata, its impl.

In: a spec (once), a batch (once per step), q, k, v (once per layer). Out: attention. The card
(`__init__`) imports without the package that it stands for; `builtin.py` names them all, and nobody
imports one by hand: selection does, by string.
"""
