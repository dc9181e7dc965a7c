"""Recurrent states in plain torch: every kind and every form, one request at a time.

This is the reference implementation. It reads lengths, slots and positions on the host.
"""
