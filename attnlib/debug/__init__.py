"""Debugging tools: value validation, shadow execution, call recording and replay."""
