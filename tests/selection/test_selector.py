"""Selection: precedence, explicit requests, auto, reasons, and caches."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import dataclasses
import logging
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch

import attnlib
from attnlib import env
from attnlib.backends.torch import TorchBackend
from attnlib.cache.layout import set_kv_cache_layout
from attnlib.capabilities import Sizes
from attnlib.device import DeviceInfo
from attnlib.errors import (
    BackendUnavailableError,
    ContractError,
    EnvironmentVariableError,
    LayoutMismatchError,
    RegistrationError,
    UnknownBackendError,
    UnsupportedConfigError,
)
from attnlib.selection import selector, unregister_backend
from attnlib.selection.current import selection_state
from attnlib.selection.report import SelectionStatus
from tests.call_counts import counted_calls

SPEC = attnlib.AttentionSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32)


class Picky(TorchBackend):
    """A backend that supports head size 128 only."""

    capabilities = dataclasses.replace(TorchBackend.capabilities, head_sizes=Sizes(exactly=(128,)))

    @staticmethod
    def get_name() -> str:
        return "picky"


class Other(TorchBackend):
    """The torch backend under another name."""

    @staticmethod
    def get_name() -> str:
        return "other"


@pytest.fixture(autouse=True)
def _unregister(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    before = set(attnlib.list_backends())
    yield
    for name in set(attnlib.list_backends()) - before:
        unregister_backend(name)


def _chosen(**changes) -> type:
    return attnlib.get_attn_backend(**{"spec": SPEC, "device": "cpu", **changes})


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: argument, use_backend, ATTNLIB_BACKEND, priority; changes apply at once."""
    attnlib.register_backend("picky", Picky)
    attnlib.register_backend("other", Other)
    attnlib.register_backend(
        "third", type("Third", (Other,), {"get_name": staticmethod(lambda: "third")})
    )
    assert _chosen() is TorchBackend
    monkeypatch.setenv("ATTNLIB_BACKEND", "OTHER")
    assert _chosen() is Other
    with attnlib.use_backend("third"):
        assert _chosen().get_name() == "third"
        assert _chosen(backend="torch") is TorchBackend
    assert _chosen() is Other
    monkeypatch.setenv("ATTNLIB_BACKEND", "auto")
    assert _chosen() is TorchBackend


@pytest.mark.parametrize("source", ["argument", "use_backend", "ATTNLIB_BACKEND"])
def test_an_unknown_name_is_reported_with_its_source(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1"""
    with pytest.raises(UnknownBackendError) as caught:
        if source == "argument":
            _chosen(backend="tirton")
        elif source == "use_backend":
            with attnlib.use_backend("tirton"):
                pass
        else:
            monkeypatch.setenv("ATTNLIB_BACKEND", "tirton")
            _chosen()
    text = str(caught.value)
    assert (
        f"'tirton' (from {source}='tirton')" in text
        and "Did you mean 'triton'?" in text
        and "torch" in text
    )
    assert isinstance(caught.value, ValueError)


def test_an_explicit_choice_is_refused_with_all_reasons() -> None:
    """S2"""
    attnlib.register_backend("picky", Picky)
    with pytest.raises(UnsupportedConfigError) as caught:
        _chosen(
            backend="picky",
            spec=SPEC.replace(dtype=torch.float64, head_size=60, mask_kind="causal"),
        )
    assert caught.value.backend == "picky" and caught.value.reasons == (
        "head_size=60 not supported (supported: 128)",
    )
    assert "(from argument) is unsupported" in str(
        caught.value
    ) and "Backends that support this spec here: torch" in str(caught.value)


def test_an_explicit_choice_that_is_unavailable_is_an_error() -> None:
    attnlib.register_backend(
        "gone", "no_such_package.backend:Backend", install_hint="pip install no-such-package"
    )
    with pytest.raises(
        BackendUnavailableError,
        match="ModuleNotFoundError.*no_such_package.*try: pip install no-such-package.*torch",
    ) as caught:
        _chosen(backend="gone")
    text = str(caught.value)
    abi = torch.compiled_with_cxx11_abi()
    versions = f"torch {torch.__version__}, cxx11 ABI {abi}, CUDA {torch.version.cuda}; cpu]"
    assert versions in text, "I3"
    assert isinstance(caught.value, ImportError) and text.count("cxx11 ABI") == 1


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('version mismatch')",
        "raise OSError('undefined symbol: _ZN3c10')",
        "Backend = 3",
    ],
)
def test_whatever_an_import_raises_is_a_reason(
    body: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I2: auto continues, and `explain` shows the original error."""
    (tmp_path / "broken_backend.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "broken_backend", raising=False)
    attnlib.register_backend("broken", "broken_backend:Backend", priority=1000)
    report = attnlib.explain(SPEC, device="cpu")
    statuses = {c.name: c for c in report.candidates}
    assert report.chosen == "torch" and statuses["broken"].status is SelectionStatus.UNAVAILABLE
    assert any(
        word in statuses["broken"].reasons[0]
        for word in ("version mismatch", "undefined symbol", "must be a subclass")
    )


def test_auto_chooses_the_first_that_fits_and_logs_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S2, S7"""
    attnlib.register_backend("picky", Picky, priority=500)
    with caplog.at_level(logging.INFO, logger="attnlib"):
        assert _chosen(layer_name="model.layers.0.attn") is TorchBackend
    assert len(caplog.records) == 1
    assert (
        "model.layers.0.attn: chose torch on cpu" in caplog.text
        and "picky: unsupported (head_size=64 not supported" in caplog.text
    )
    assert _chosen(spec=SPEC.replace(head_size=128)) is Picky


def test_auto_without_a_candidate_lists_every_reason() -> None:
    with pytest.raises(
        UnsupportedConfigError, match=r"(?s)no backend supports .*torch: device tpu not supported"
    ):
        attnlib.get_attn_backend(SPEC, device=DeviceInfo("tpu"))


def test_excluding_a_backend_from_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6"""
    attnlib.register_backend("other", Other, priority=500)
    assert _chosen() is Other
    monkeypatch.setenv("ATTNLIB_BACKEND", "-other")
    assert _chosen() is TorchBackend
    assert {c.name: c.status for c in attnlib.explain(SPEC, device="cpu").candidates}[
        "other"
    ] is SelectionStatus.EXCLUDED


def test_a_pair_is_an_ordinary_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: naming one backend for both phases gives that backend."""
    attnlib.register_backend("other", Other)
    pair = _chosen(backend="prefill:other,decode:torch")
    assert pair.get_name() == "prefill:other,decode:torch" and pair is _chosen(
        backend="decode:torch,prefill:other"
    )
    assert _chosen(backend="prefill:torch,decode:torch") is TorchBackend
    assert pickle.loads(pickle.dumps(pair)) is pair
    monkeypatch.setenv("ATTNLIB_BACKEND", "prefill:other,decode:torch")
    assert _chosen() is pair


@pytest.mark.parametrize(
    "text", ["prefill:torch", "torch,triton", "torch,-triton", "prefill:torch,decode:triton,-torch"]
)
def test_an_invalid_request_is_an_error(text: str) -> None:
    with pytest.raises(UnknownBackendError, match="is not a valid request"):
        _chosen(backend=text)


@pytest.mark.parametrize("request_", [5, torch.float32, ["torch"]])
def test_a_request_of_another_type_is_an_error(request_: object) -> None:
    with pytest.raises(
        UnknownBackendError, match="argument=.* is a (int|dtype|list): give a backend's name"
    ):
        _chosen(backend=request_)
    with (
        pytest.raises(UnknownBackendError, match="use_backend=.* is a (int|dtype|list)"),
        attnlib.use_backend(request_),
    ):
        pass
    with pytest.raises(RegistrationError, match="must be a subclass of attnlib.AttentionBackend"):
        _chosen(backend=int)


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(ContractError, match="device='gpu' is not known; use 'cpu', 'cuda'"):
        attnlib.explain(SPEC, "gpu")


def test_a_class_needs_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class as request replaces the registered backend of its name, in `explain` too."""
    assert _chosen(backend=Other) is Other
    with attnlib.use_backend(Other):
        assert _chosen() is Other and attnlib.explain(SPEC, "cpu").source == "use_backend"
    report = attnlib.explain(SPEC, "cpu", Other)
    assert report.chosen == "other" and [c.name for c in report.candidates].count("other") == 1
    mine = type("Mine", (Other,), {"get_name": staticmethod(lambda: "torch")})
    assert (
        _chosen(backend=mine) is mine
        and [c.name for c in attnlib.explain(SPEC, "cpu", mine).candidates].count("torch") == 1
    )
    assert _chosen() is TorchBackend


def test_explain_and_selection_agree_about_pairs() -> None:
    """Two backends that each fit may not fit together: no common layout, no decode phase."""
    for layout in ("NHD", "HND"):
        backend = type(
            layout,
            (Other,),
            {
                "capabilities": dataclasses.replace(
                    TorchBackend.capabilities, kv_cache_layouts=(layout,)
                )
            },
        )
        attnlib.register_backend(layout, backend)
    attnlib.register_backend("other", Other)
    report = attnlib.explain(SPEC, "cpu", "prefill:nhd,decode:hnd")
    assert report.chosen is None and report.candidates[0].name == "prefill:nhd,decode:hnd"
    assert "no common KV-cache layout" in report.candidates[0].reasons[0]
    with pytest.raises(LayoutMismatchError, match="no common KV-cache layout"):
        _chosen(backend="prefill:nhd,decode:hnd")
    encoder = SPEC.replace(attn_type="encoder_only")
    assert attnlib.explain(encoder, "cpu", "prefill:other,decode:torch").chosen is None
    with pytest.raises(
        UnsupportedConfigError,
        match="attn_type=encoder_only has no decode phase: choose a single backend",
    ):
        _chosen(spec=encoder, backend="prefill:other,decode:torch")
    assert (
        attnlib.explain(SPEC, "cpu", "prefill:other,decode:torch").candidates[0].status
        is SelectionStatus.ACCEPTED
    )


def test_the_layout_of_the_environment_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: a backend that cannot read it is unsupported; changes apply at once."""
    capabilities = dataclasses.replace(TorchBackend.capabilities, kv_cache_layouts=("NHD",))
    attnlib.register_backend(
        "nhd", type("Nhd", (Other,), {"capabilities": capabilities}), priority=900
    )
    assert _chosen().capabilities.kv_cache_layouts == ("NHD",)
    monkeypatch.setenv("ATTNLIB_KV_CACHE_LAYOUT", "HND")
    assert _chosen() is TorchBackend
    assert attnlib.explain(SPEC, "cpu").reasons()["nhd"] == [
        "kv_cache_layout=HND not supported (supported: NHD)"
    ]
    assert _chosen(spec=SPEC.replace(kv_cache_layout="NHD")).capabilities.kv_cache_layouts == (
        "NHD",
    ), "a spec's own layout wins"
    monkeypatch.delenv("ATTNLIB_KV_CACHE_LAYOUT")
    set_kv_cache_layout("HND")
    try:
        assert _chosen() is TorchBackend
    finally:
        set_kv_cache_layout(None)


@pytest.mark.parametrize("method", ["validate_configuration", "unavailable"])
def test_a_backend_that_raises_does_not_prevent_the_choice_of_another(method: str) -> None:
    def fails(cls, *args):
        raise RuntimeError("boom")

    attnlib.register_backend(
        "failing", type("Failing", (Other,), {method: classmethod(fails)}), priority=900
    )
    assert _chosen() is TorchBackend
    assert "RuntimeError: boom" in attnlib.explain(SPEC, "cpu").reasons()["failing"][0]
    with pytest.raises(
        (UnsupportedConfigError, BackendUnavailableError), match="RuntimeError: boom"
    ):
        _chosen(backend="failing")


def test_variables_of_other_systems_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4"""
    monkeypatch.setattr(env, "_warned", set())
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    with pytest.warns(
        UserWarning,
        match="VLLM_ATTENTION_BACKEND='FLASHINFER' is set, but attnlib does not read it; it reads "
        "ATTNLIB_BACKEND",
    ):
        attnlib.get_attn_backend(SPEC.replace(head_size=24), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnlib.get_attn_backend(SPEC.replace(head_size=40), device="cpu")


def test_a_missing_device_is_the_reason_of_every_backend() -> None:
    """Every backend reports the missing GPU and the next action; a hypothetical one works."""
    missing = DeviceInfo("cuda", 3, is_missing=True)
    spec = attnlib.AttentionSpec(
        num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float16, block_size=16
    )
    report = attnlib.explain(spec, device=missing)
    assert report.chosen is None and "cuda:3 (not found)" in str(report)
    for name in ("torch", "triton"):
        reason = next(
            candidate for candidate in report.candidates if candidate.name == name
        ).reasons[0]
        assert (
            reason.startswith("no CUDA device 3 is visible")
            and "device='cpu'" in reason
            and "device='sm_90'" in reason
        )
    with pytest.raises(UnsupportedConfigError, match="no CUDA device 3 is visible"):
        attnlib.get_attn_backend(spec, device=missing)
    assert attnlib.explain(spec, device="sm_90").chosen is not None


@pytest.mark.parametrize("backend", [None, "torch", TorchBackend], ids=["auto", "name", "class"])
def test_selecting_for_a_new_spec_is_fast(backend: str | type | None) -> None:
    """D27: installed packages are looked up once, not for each spec."""
    _chosen(backend=backend)
    specs = [SPEC.replace(head_size=size, block_size=48) for size in range(8, 512, 8)]
    with counted_calls() as calls:
        for spec in specs:
            _chosen(backend=backend, spec=spec)
    looked_up = {name for name in calls if name.startswith(("posix.", "nt.", "_io.", "metadata."))}
    assert calls["selector._select"] == len(specs) and not looked_up
    assert calls.total() < 6000 * len(specs)


def test_the_selection_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """D27"""
    monkeypatch.setattr(selector, "_MAX_CACHED", 8)
    selector._cache.clear()
    for head_size in range(8, 512, 8):
        _chosen(spec=SPEC.replace(head_size=head_size))
    assert len(selector._cache) <= 8


def test_availability_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cached for one state of the environment, and probed again after a failure."""
    available = [False]
    calls = []

    def unavailable(cls: type, device: DeviceInfo) -> list[str]:
        calls.append(os.environ.get("SOME_COMPILER"))
        return [] if available[0] or calls[-1] else ["no compiler"]

    backend = type("Needy", (Other,), {"unavailable": classmethod(unavailable)})
    attnlib.register_backend("needy", backend)
    with pytest.raises(BackendUnavailableError, match="no compiler"):
        _chosen(backend="needy")
    monkeypatch.setenv("SOME_COMPILER", "cc")
    assert issubclass(_chosen(backend="needy"), backend)
    assert issubclass(_chosen(backend="needy", spec=SPEC.replace(head_size=32)), backend)
    assert calls == [None, "cc"]
    monkeypatch.delenv("SOME_COMPILER")
    attnlib.register_backend("needy", backend, override=True)
    with pytest.raises(BackendUnavailableError, match="no compiler"):
        _chosen(backend="needy")
    available[0] = True
    assert issubclass(_chosen(backend="needy"), backend)


def test_the_error_of_auto_has_reasons_first_and_only_what_is_special() -> None:
    """The layer comes after the reasons, without the fields that have their defaults."""
    spec = SPEC.replace(sliding_window=7, mask_kind="causal")
    with pytest.raises(UnsupportedConfigError) as caught:
        attnlib.get_attn_backend(spec, device=DeviceInfo("tpu"))
    text = str(caught.value)
    assert text.index("device tpu not supported") < text.index("AttentionSpec(")
    layer = text[text.index("AttentionSpec(") :]
    assert "sliding_window=7" in layer and "num_kv_heads=2" in layer
    assert "block_size" not in layer and "mask_kind" not in layer and "head_size_v" not in layer


def _name_in_pool(run) -> str:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return run(pool).result().get_name()


def test_use_backend_and_threads() -> None:
    """The request is a context variable: new threads do not have it, unless their work runs in a
    copy of the caller's context."""
    attnlib.register_backend("other", Other)
    with attnlib.use_backend("other"):
        assert _name_in_pool(lambda pool: pool.submit(_chosen)) == "torch"
        run = contextvars.copy_context().run
        assert _name_in_pool(lambda pool: pool.submit(run, _chosen)) == "other"


def test_use_backend_and_tasks() -> None:
    """A task has the request of the place where it is made, and its own requests stay inside."""
    attnlib.register_backend("other", Other)

    async def inner() -> str:
        with attnlib.use_backend("torch"):
            await asyncio.sleep(0)
            return _chosen().get_name()

    async def outer() -> list[str]:
        with attnlib.use_backend("other"):
            task = asyncio.create_task(inner())
            await asyncio.sleep(0)
            return [_chosen().get_name(), await task, _chosen().get_name()]

    assert asyncio.run(outer()) == ["other", "torch", "other"]


def test_every_input_of_a_selection_is_in_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches elsewhere are keyed by `selection_state`."""
    states = [selection_state()]
    for name, value in (
        ("ATTNLIB_BACKEND", "torch"),
        ("ATTNLIB_KV_CACHE_LAYOUT", "HND"),
        ("ATTNLIB_TUNING", "another.json"),
        ("ATTNLIB_PLUGINS", "0"),
        ("TRITON_INTERPRET", "0" if os.environ.get("TRITON_INTERPRET") == "1" else "1"),
    ):
        monkeypatch.setenv(name, value)
        states.append(selection_state())
    attnlib.register_backend("other", Other)
    states.append(selection_state())
    with attnlib.use_backend("torch"):
        states.append(selection_state())
    assert len(set(states)) == len(states)


PATH_OF_OTHER = "tests.selection.test_selector:Other"


@pytest.mark.parametrize("source", ["argument", "use_backend", "ATTNLIB_BACKEND"])
def test_a_path_names_a_backend_in_every_setting(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """D3: `module:Class` and `path.py:Class`, in their own case, alone and in pairs."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    file = tmp_path / "Backend_of_a_File.py"
    file.write_text(
        f"from {__name__} import Other\n\n\nclass Own(Other):\n"
        "    @staticmethod\n    def get_name():\n        return 'own'\n"
    )

    def chosen(text: str) -> type:
        if source == "ATTNLIB_BACKEND":
            monkeypatch.setenv(source, text)
        if source == "use_backend":
            with attnlib.use_backend(text):
                return _chosen()
        return _chosen(backend=text if source == "argument" else None)

    assert chosen(f"{__name__}:Other") is Other
    own = chosen(f"{file}:Own")
    assert own.get_name() == "own" and own.__module__ == "Backend_of_a_File"
    pair = chosen(f"prefill:{__name__}:Other,decode:torch")
    assert pair.get_name() == "prefill:other,decode:torch"
    assert chosen(f"Prefill:{file}:Own, decode:{__name__}:Other").get_name() == (
        "prefill:own,decode:other"
    )
    assert chosen(f"prefill:{file}:Own,decode:{file}:Own") is own


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nowhere_at_all:Backend", "No module named 'nowhere_at_all'"),
        ("nowhere.py:Backend", "nowhere.py does not exist in .*: give path/to/file.py:NAME"),
        ("./my.py", r"the file './my.py' without a class: write ./my.py:CLASS"),
        ("prefill:my.py,decode:torch", "without a class: write my.py:CLASS"),
        (f"{PATH_OF_OTHER}s", "has no 'Others'.*did you mean 'Other'"),
        ("a-b:Class", "write module:NAME or path/to/file.py:NAME"),
        ("prefil:torch,decode:torch", "'prefil' is not a phase.* prefill, decode, prefix, suffix. "
         "Did you mean 'prefill'?"),
        ("decod:torch", "'decod' is not a phase.*Did you mean 'decode'?"),
        ("step:torch,decode:torch", "'step' is not a phase; the phases are prefill, decode"),
        (f"prefix:torch,sufix:{PATH_OF_OTHER}", "'sufix' is not a phase.*Did you mean 'suffix'?"),
    ],
)  # fmt: skip
def test_a_wrong_path_or_phase_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(UnknownBackendError, match=reason) as caught:
        _chosen(backend=text)
    assert f"argument={text!r}" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["auto,torch", ",", "torch,", "torch,,triton", "auto,auto", "-", ":", "prefill:",
             "prefill:torch", "prefill:torch,prefill:triton", "sufix:torch,prefix:torch"],
)  # fmt: skip
def test_malformed_requests(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: an error, and for ATTNLIB_BACKEND the one that docs/environment.md names."""
    with pytest.raises(UnknownBackendError):
        _chosen(backend=text)
    monkeypatch.setenv("ATTNLIB_BACKEND", text)
    with pytest.raises(EnvironmentVariableError, match="ATTNLIB_BACKEND="):
        _chosen()


def test_a_module_that_fails_at_import_is_unavailable(tmp_path: Path) -> None:
    file = tmp_path / "failing_backend.py"
    file.write_text("import no_such_package\n")
    for _ in range(2):  # the failed import leaves no module behind
        with pytest.raises(BackendUnavailableError, match="No module named 'no_such_package'"):
            _chosen(backend=f"{file}:Backend")
    file.write_text("raise SystemExit(3)\n")
    with pytest.raises(BackendUnavailableError, match="cannot be imported: SystemExit: 3"):
        _chosen(backend=f"{file}:Backend")
    taken = tmp_path / "torch.py"
    taken.write_text("Backend = 1\n")
    with pytest.raises(UnknownBackendError, match="a module of this name is already imported"):
        _chosen(backend=f"{taken}:Backend")


def test_two_backends_of_one_name_form_no_pair() -> None:
    attnlib.register_backend("other", type("Mine", (Other,), {}))
    with pytest.raises(UnknownBackendError, match="two backends of one name, 'other'"):
        _chosen(backend=f"prefill:{PATH_OF_OTHER},decode:other")
