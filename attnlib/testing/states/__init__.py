"""Conformance of state layers (T1 to T20): the oracle, inputs, served requests and checks."""
