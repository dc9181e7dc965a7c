"""Gluon device code for Hopper (SM90); no host code."""
