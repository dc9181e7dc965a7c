"""The conformance kit: prove that any backend computes what the others compute.

In: a backend (name, `module:Class` path or class). Out: a report whose `passed` is a bool. On the way: a batch spec
(`batch_spec`) and a placement of its blocks (`placements`) become seeded tensors with poison in everything unused
(`inputs`, `layouts`); a float64 `oracle` that shares no code with any backend says what is right; a `budget` says how
close is close enough. Nothing here needs more than torch, and every case runs on a CPU.
"""

from __future__ import annotations
