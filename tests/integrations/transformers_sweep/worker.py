"""A worker process: reads architectures from stdin, writes one JSON record per line to stdout."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings

import torch
import transformers

from tests.integrations.transformers_sweep.trial import installed, run_architecture


def main() -> None:
    """Run architectures until stdin ends."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    os.environ["ATTNLIB_BACKEND"] = "torch"
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # models print
    with installed():
        for line in sys.stdin:
            kind, model_type, class_name = line.split()
            started = time.perf_counter()
            record = run_architecture(model_type, class_name, kind)
            record["seconds"] = round(time.perf_counter() - started, 2)
            print(json.dumps(record), file=out, flush=True)


if __name__ == "__main__":
    main()
