"""The former path of `attnlib.mla.latent_attention`."""

from attnlib.mla.latent_attention import *  # noqa: F403
