"""Integrations with model libraries. attnlib itself imports none of these packages."""
