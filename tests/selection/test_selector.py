"""Selection: precedence, explicit wishes, auto, reasons, caches."""

import dataclasses
import json
import logging
import pickle
import warnings

import pytest
import torch

import attnlib
from attnlib import env
from attnlib.backends.torch import TorchBackend
from attnlib.backends.triton import TritonBackend
from attnlib.capabilities import Sizes
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import (
    BackendUnavailableError,
    ContractError,
    LayoutMismatchError,
    RegistrationError,
    UnknownBackendError,
    UnsupportedConfigError,
)
from attnlib.selection.decision import resolve
from attnlib.selection.registry import Registration, lookup
from attnlib.selection.report import SelectionStatus
from attnlib.selection.request import AUTO, Request, parse_request

SPEC = attnlib.AttentionSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32)
H200, T4, CPU = (
    DeviceInfo("cuda", 0, (9, 0), name="H200", is_hypothetical=True),
    DeviceInfo("cuda", 0, (7, 5), is_hypothetical=True),
    DeviceInfo("cpu"),
)


class Picky(TorchBackend):
    """A backend that takes heads of 128 only."""

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
def _clean(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    before = set(attnlib.list_backends())
    yield
    for name in set(attnlib.list_backends()) - before:
        attnlib.unregister_backend(name)


def _chosen(**changes) -> type:
    return attnlib.get_attn_backend(**{"spec": SPEC, "device": "cpu", **changes})


def test_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: argument, then use_backend, then ATTNLIB_BACKEND, then priority; changes in the process take effect."""
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
def test_an_unknown_name_says_where_it_came_from(
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


def test_an_explicit_choice_is_refused_with_all_reasons_never_replaced() -> None:
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
    ) and "Backends that accept the same spec here: torch" in str(caught.value)


def test_an_explicit_choice_that_is_not_here_is_an_error() -> None:
    attnlib.register_backend(
        "gone", "no_such_package.backend:Backend", install_hint="pip install no-such-package"
    )
    with pytest.raises(
        BackendUnavailableError,
        match="ModuleNotFoundError.*no_such_package.*try: pip install no-such-package.*torch",
    ) as caught:
        _chosen(backend="gone")
    text = str(caught.value)
    assert (
        f"torch {torch.__version__}, cxx11 ABI {torch.compiled_with_cxx11_abi()}, CUDA {torch.version.cuda}; cpu]"
        in text
    ), "I3"
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
    """I2: auto goes on, and `explain` shows the original error."""
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


def test_auto_takes_the_first_that_fits_and_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
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
        UnsupportedConfigError, match=r"(?s)no backend fits .*torch: device tpu not supported"
    ):
        attnlib.get_attn_backend(SPEC, device=DeviceInfo("tpu"))


def test_taking_candidates_out_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6"""
    attnlib.register_backend("other", Other, priority=500)
    assert _chosen() is Other
    monkeypatch.setenv("ATTNLIB_BACKEND", "-other")
    assert _chosen() is TorchBackend
    assert {c.name: c.status for c in attnlib.explain(SPEC, device="cpu").candidates}[
        "other"
    ] is SelectionStatus.EXCLUDED


def test_an_excluded_backend_is_not_loaded() -> None:
    probed = []

    def probe(entry: Registration):
        probed.append(entry.name)
        return TorchBackend, []

    entries = [Registration("a", TorchBackend, 2), Registration("b", TorchBackend, 1)]
    report = resolve(
        SPEC, CPU, entries, Request("ATTNLIB_BACKEND", excluded=frozenset({"a"})), probe
    )
    assert probed == ["b"] and report.chosen == "b"


def test_a_pair_is_an_ordinary_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: the same name for both phases is that backend."""
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
def test_forms_that_mean_nothing_are_errors(text: str) -> None:
    with pytest.raises(UnknownBackendError, match="not understood"):
        _chosen(backend=text)


@pytest.mark.parametrize("wish", [5, torch.float32, ["torch"]])
def test_a_wish_of_another_kind_is_named(wish: object) -> None:
    with pytest.raises(
        UnknownBackendError, match="argument=.* is a (int|dtype|list): give a backend's name"
    ):
        _chosen(backend=wish)
    with (
        pytest.raises(UnknownBackendError, match="use_backend=.* is a (int|dtype|list)"),
        attnlib.use_backend(wish),
    ):
        pass
    with pytest.raises(RegistrationError, match="must be a subclass of attnlib.AttentionBackend"):
        _chosen(backend=int)


def test_unknown_devices_are_named() -> None:
    with pytest.raises(ContractError, match="device='gpu' is not known; use 'cpu', 'cuda'"):
        attnlib.explain(SPEC, "gpu")


def test_a_class_needs_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument or `use_backend` may be a class; it stands in for a registered backend of its name, and `explain` agrees."""
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
    """Halves that each fit may not fit together: no common layout, or no decode phase."""
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
        UnsupportedConfigError, match="attn_type=encoder_only has no decode phase: name one backend"
    ):
        _chosen(spec=encoder, backend="prefill:other,decode:torch")
    assert (
        attnlib.explain(SPEC, "cpu", "prefill:other,decode:torch").candidates[0].status
        is SelectionStatus.ACCEPTED
    )


def test_a_layout_that_the_user_insists_on_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: who cannot read it is no candidate; changing it takes effect at once."""
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
    attnlib.set_kv_cache_layout("HND")
    try:
        assert _chosen() is TorchBackend
    finally:
        attnlib.set_kv_cache_layout(None)


@pytest.mark.parametrize("method", ["validate_configuration", "unavailable"])
def test_a_backend_that_fails_when_asked_does_not_take_the_choice_away(method: str) -> None:
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


def test_requests_read_back() -> None:
    known = ("torch", "triton")
    assert parse_request("auto", "x", known).is_auto
    for text in ("torch", "prefill:torch,decode:triton", "auto,-torch,-triton"):
        assert parse_request(text, "x", known).text == text


def test_imagined_hardware() -> None:
    """The decision is pure: an H200 and a T4 are decided about on any machine."""
    entries = [Registration("triton", TritonBackend, 300), Registration("torch", TorchBackend, 100)]

    def probe(entry: Registration):
        return entry.load(), []

    assert resolve(SPEC, H200, entries, AUTO, probe).chosen == "triton"
    report = resolve(SPEC, T4, entries, AUTO, probe)
    assert report.chosen == "torch" and report.reasons()["triton"] == [
        "compute capability 7.5 is below 8.0"
    ]
    assert resolve(SPEC, CPU, entries, AUTO, probe).chosen == "torch", (
        "a CPU only interprets Triton: by name, never by auto"
    )


def test_the_report_is_data_and_a_table() -> None:
    report = attnlib.explain(SPEC, device="cpu")
    assert json.loads(json.dumps(report.to_dict()))["chosen"] == "torch"
    lines = str(report).splitlines()
    assert lines[0].startswith("attnlib chose torch") and any(
        "torch" in line and "accepted" in line for line in lines[1:]
    )


def test_foreign_variables_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S4"""
    monkeypatch.setattr(env, "_warned", set())
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    with pytest.warns(
        UserWarning,
        match="VLLM_ATTENTION_BACKEND='FLASHINFER' is set, but attnlib does not read it; it reads ATTNLIB_BACKEND",
    ):
        attnlib.get_attn_backend(SPEC.replace(head_size=24), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnlib.get_attn_backend(SPEC.replace(head_size=40), device="cpu")


def test_the_seed_form() -> None:
    """vLLM's positional arguments."""
    assert (
        attnlib.get_attn_backend(64, torch.float32, "auto", 16, False, use_mla=False, has_sink=True)
        is TorchBackend
    )
    assert (
        attnlib.get_attn_backend(
            head_size=64, dtype=torch.float32, kv_cache_dtype=None, block_size=16
        )
        is TorchBackend
    )
    assert attnlib.get_attn_backend(64, torch.float32, None, 16) is attnlib.get_attn_backend(
        64, torch.float32, None, block_size=16
    )
    with pytest.raises(UnsupportedConfigError, match="needs no attention backend"):
        attnlib.get_attn_backend(64, torch.float32, "auto", 16, True)
    with pytest.raises(ContractError, match="spec='torch' must be an attnlib.AttentionSpec"):
        attnlib.get_attn_backend("torch")
    with pytest.raises(ContractError, match="spec=None must be"):
        attnlib.get_attn_backend()


def test_names_are_taken_once() -> None:
    """X1"""
    attnlib.register_backend("other", Other)
    with pytest.raises(
        RegistrationError, match=r"'other' is registered already \(registered\).*override=True"
    ):
        attnlib.register_backend("Other", Picky)
    attnlib.register_backend("other", Picky, override=True)
    assert lookup("OTHER").target is Picky
    with pytest.raises(RegistrationError, match="it is built in"):
        attnlib.unregister_backend("torch")
    with pytest.raises(RegistrationError, match="it is not registered"):
        attnlib.unregister_backend("nobody")
    for name in ("", "auto", "-x", "a,b", "prefill:x"):
        with pytest.raises(RegistrationError, match="is no name for a backend"):
            attnlib.register_backend(name, Other)


def test_overriding_a_built_in_and_taking_it_back() -> None:
    attnlib.register_backend("torch", Other, priority=100, override=True)
    assert _chosen() is Other
    attnlib.unregister_backend("torch")
    assert _chosen() is TorchBackend


def test_config_reaches_builder_and_impl_and_travels() -> None:
    """X2"""
    attnlib.register_backend("tuned", Other, config={"tile": 64})
    backend = _chosen(backend="tuned")
    assert backend.config == {"tile": 64} and issubclass(backend, Other) and Other.config == {}
    assert backend.make_builder(SPEC, "cpu").config == {"tile": 64}
    assert attnlib.Attention(SPEC, backend="tuned", device="cpu").impl.config == {"tile": 64}
    assert pickle.loads(pickle.dumps(backend)) is backend


def test_the_decorator_form_returns_the_class() -> None:
    @attnlib.register_backend("decorated")
    class Decorated(Other):
        pass

    assert Decorated.get_name() == "other" and _chosen(backend="decorated") is Decorated


def test_classes_that_do_not_fit_show_why() -> None:
    """Checked where the author is looking."""

    class NoBuilder(attnlib.AttentionBackend):
        capabilities = TorchBackend.capabilities

        @staticmethod
        def get_name() -> str:
            return "nobuilder"

    with pytest.raises(RegistrationError, match="lacks get_impl_cls, get_builder_cls"):
        attnlib.register_backend("x", NoBuilder)
    with pytest.raises(RegistrationError, match="must be a subclass of attnlib.AttentionBackend"):
        attnlib.register_backend("x", int)  # type: ignore[call-overload]

    class BadImpl(TorchBackend.get_impl_cls()):
        def forward(self, q, cache, metadata, output, lse=None):
            pass

    with pytest.raises(
        RegistrationError, match=r"forward\(self, q, cache.*the layer calls forward\(self, query"
    ):
        attnlib.register_backend(
            "x", type("Bad", (Other,), {"get_impl_cls": staticmethod(lambda: BadImpl)})
        )
    with pytest.raises(RegistrationError, match="must be a dataclass"):
        attnlib.register_backend(
            "x", type("Bad", (Other,), {"get_metadata_cls": staticmethod(lambda: int)})
        )
    with pytest.raises(RegistrationError, match="write it as 'package.module:Class'"):
        attnlib.register_backend("x", "package.module.Class")


def test_every_built_in_path_leads_to_a_backend_of_that_name() -> None:
    for name in attnlib.list_backends():
        assert attnlib.selection.load_backend(name).get_name() == name


def test_a_device_that_is_not_visible() -> None:
    """Nothing is chosen for a GPU that nobody sees: each candidate says so, with the next action, and an imagined one is answered."""
    gone = DeviceInfo("cuda", 3, is_missing=True)
    spec = attnlib.AttentionSpec(
        num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float16, block_size=16
    )
    report = attnlib.explain(spec, device=gone)
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
        attnlib.get_attn_backend(spec, device=gone)
    assert attnlib.explain(spec, device="sm_90").chosen is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_asked_for_where_there_is_none() -> None:
    """The facts about "cuda" on a machine without a GPU say that it is missing."""
    assert (
        resolve_device("cuda").is_missing
        and not resolve_device("cpu").is_missing
        and not resolve_device("sm_90").is_missing
    )
