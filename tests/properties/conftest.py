"""Options of the property tests; see CONTRIBUTING.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.properties.campaign import Campaign

BOUNDED = [
    Campaign(backend="torch", draws=150),
    Campaign(backend="triton", draws=3),
    Campaign(backend="triton", seed=1000, draws=40),
    Campaign(backend="prefill:torch,decode:triton", draws=12),
    Campaign(backend="prefill:triton,decode:torch", draws=12),
]
"""What runs without options: the first two in the default selection, the others if slow."""
FAST = 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `campaign` from the options, or with the bounded campaigns."""
    if "campaign" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    if option("--draws") is None:
        params = [
            pytest.param(one, marks=[] if number < FAST else [pytest.mark.slow])
            for number, one in enumerate(BOUNDED)
        ]
    else:
        backend = option("--draw-backend")
        default = "cuda" if torch.cuda.is_available() and backend != "torch" else "cpu"
        chosen = Campaign(
            backend=backend,
            device=option("--draw-device") or default,
            seed=option("--draw-seed"),
            draws=option("--draws"),
            draws_per_spec=option("--draws-per-spec"),
            forms_per_spec=option("--draw-forms"),
            processes=option("--draw-processes"),
            seconds=option("--draw-seconds"),
            commit=option("--draw-commit"),
        )
        params = [chosen]
    metafunc.parametrize("campaign", params, ids=lambda one: f"{one.backend}-{one.seed}")


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Path | None:
    """The file of `--draw-report`."""
    path = request.config.getoption("--draw-report")
    return None if path is None else Path(path)
