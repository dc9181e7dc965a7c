"""The options of `attnlib demo`."""

from __future__ import annotations

from attnlib import example_model
from attnlib.cli.arguments import CommandParser, add_device_flag, count, model_dtype, seed

__all__ = ["parser"]


def parser() -> CommandParser:
    """The arguments of `attnlib demo`."""
    made = CommandParser(
        prog="attnlib demo",
        description="Serve a batch of prompts with a transformers model whose layers attend over "
        "one paged cache: requests start and end at different steps, share prefixes, and are "
        "preempted if the cache is full. Then compare tokens and logits with the model's own eager "
        "attention. Exit status: 0 if they agree, 1 if not, 2 if the demo cannot run.",
        epilog=f"The default model is {example_model.NAME} if attnlib[model] is installed (terms "
        f"of use: {example_model.TERMS}), else a small decoder with random weights, which writes "
        "no text.",
    )
    made.add_argument(
        "--model",
        help="folder or name of a causal language model, or `seeded`: the small decoder",
    )
    made.add_argument("--backend", metavar="REQUEST", help="as ATTNLIB_BACKEND (default: auto)")
    add_device_flag(made)
    made.add_argument(
        "--dtype",
        type=model_dtype,
        help="bfloat16, float16 or float32 (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    _add_sizes(made)
    made.add_argument(
        "--seed", type=seed, default=0, help="seed of the weights of the small decoder (default 0)"
    )
    made.add_argument(
        "--tiny", action="store_true", help="a very small model and three short prompts"
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def _add_sizes(made: CommandParser) -> None:
    """Add the sizes of the batch and of the cache."""
    sizes = made.add_argument_group("sizes")
    for flag, default, about in (
        ("--requests", None, "number of prompts (default 12; 3 with --tiny)"),
        (
            "--max-new-tokens",
            None,
            "most tokens to generate for each prompt (default 24; 4 with --tiny)",
        ),
        ("--block-size", 16, "tokens in one cache block (default 16)"),
        (
            "--num-blocks",
            None,
            "blocks in the cache (default: 2/5 of what the prompts need; 4/5 with states)",
        ),
        (
            "--token-budget",
            None,
            "maximum number of tokens in one step (default 128; 48 with --tiny)",
        ),
        ("--max-num-reqs", 64, "maximum number of requests in one step (default 64)"),
    ):
        sizes.add_argument(flag, type=count, default=default, metavar="N", help=about)
