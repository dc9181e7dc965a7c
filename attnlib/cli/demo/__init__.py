"""`attnlib demo`: serve prompts by continuous batching on the paged cache, and check every token.

model       the default model and the prompts
scheduler   continuous batching: chunked prefill, prefix reuse, preemption
serve       the loop: schedule, build, run, sample
result      comparison with the model's own eager attention
view        output as text and as JSON
options     the command line
main        the run and its exit status
"""

from attnlib.cli.demo.main import main

__all__ = ["main"]
