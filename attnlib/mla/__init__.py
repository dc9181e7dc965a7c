"""Multi-head latent attention (M12): the projections around a layer over a latent cache."""

from attnlib.mla.latent_attention import LatentAttention as LatentAttention

__all__ = ["LatentAttention"]
