"""Tiles, splits and chip limits: pure functions of upper bounds, and their tables."""
