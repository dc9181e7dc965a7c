"""Command-line flags for a server on another machine: its GPU and its largest batch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from attnlib.ahead_of_time import DescribedServer
from attnlib.cli.arguments import count
from attnlib.cli.hf_file import read_config
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = ["add_server_flags", "rank_specs", "server_of"]

_DEFAULTS = {"max_num_reqs": 256, "max_num_tokens": 8192, "max_seq_len": 32768}
_ABOUT = {
    "max_num_reqs": "requests of one step (default 256)",
    "max_num_tokens": "new tokens of one step (default 8192)",
    "max_seq_len": "tokens of a sequence (default: of the positions of --config, else 32768)",
}


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the limits of batches, the multiprocessors of the GPU, the engine, and its ranks."""
    group = parser.add_argument_group("the server, whose limits decide which kernels it needs")
    for name, about in _ABOUT.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N", help=about)
    group.add_argument(
        "--num-sms", type=count, metavar="N", help="multiprocessors of the GPU (default: by model)"
    )
    group.add_argument(
        "--engine",
        choices=("attnlib", "vllm"),
        default="attnlib",
        help="whose caches the kernels read: their strides and scales differ (default: attnlib)",
    )
    group.add_argument(
        "--tensor-parallel",
        type=count,
        default=1,
        metavar="N",
        help="ranks that share the heads (default 1)",
    )


def server_of(options: argparse.Namespace) -> DescribedServer:
    """The server of the flags and of `--device`."""
    given = {name: getattr(options, name) for name in _DEFAULTS if getattr(options, name)}
    if "max_seq_len" not in given and options.config:
        given["max_seq_len"] = _position_count(options.config)
    limits = BatchLimits(**{**_DEFAULTS, **{name: n for name, n in given.items() if n}})
    device = resolve_device(options.device)
    return DescribedServer(device, limits, options.num_sms, options.engine)


def rank_specs(specs: Mapping[str, AttentionSpec], ranks: int) -> dict[str, AttentionSpec]:
    """The specs of one rank of several that share the heads. Each rank has a KV head of its own
    where there are fewer than ranks; latents are on every rank.

    Raises:
        ContractError: the heads cannot be divided.
    """
    return {kind: _of_rank(spec, ranks) for kind, spec in specs.items()} if ranks > 1 else {**specs}


def _of_rank(spec: AttentionSpec, ranks: int) -> AttentionSpec:
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ContractError(
            f"{heads} query heads and {kv_heads} KV heads cannot be divided among "
            f"--tensor-parallel {ranks} ranks: give a divisor of both"
        )
    return spec.replace(num_heads=heads // ranks, num_kv_heads=max(1, kv_heads // ranks))


def _position_count(path: str) -> int | None:
    """`max_position_embeddings` of a config; None without."""
    found = read_config(path)[1].get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None
