"""Registering backends, by name, as a decorator, with a configuration, and by several threads."""

from __future__ import annotations

import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import attnlib
from attnlib.backends.flashinfer import FlashInferBackend
from attnlib.backends.plugins import PluginBackend
from attnlib.backends.torch import TorchBackend
from attnlib.device import DeviceInfo
from attnlib.errors import BackendUnavailableError, RegistrationError, UnknownBackendError
from attnlib.selection import registration, registry, unregister_backend
from attnlib.selection.decision import decide
from attnlib.selection.registry import lookup
from attnlib.selection.report import SelectionStatus
from attnlib.selection.request import AUTO
from attnlib.tuning import Ranking

SPEC = attnlib.AttentionSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32)


class Other(TorchBackend):
    """The torch backend under another name."""

    @staticmethod
    def get_name() -> str:
        return "other"


class Third(Other):
    """Another class for the same name."""


@pytest.fixture(autouse=True)
def _unregister(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ATTNLIB_BACKEND", raising=False)
    before = set(attnlib.list_backends())
    yield
    for name in set(attnlib.list_backends()) - before:
        unregister_backend(name)


def _select(backend: str | None = None) -> type[attnlib.AttentionBackend]:
    return attnlib.get_attn_backend(SPEC, backend, "cpu")


def test_selection_imports_what_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of auto, and no other backend than a requested one; `explain` asks all."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [f"imported_backend_{place}" for place in range(3)]
    for place, name in enumerate(names):
        code = "from attnlib.backends.torch import TorchBackend\nclass Backend(TorchBackend):\n"
        body = "pass" if place else "unavailable = classmethod(lambda cls, device: ['no library'])"
        (tmp_path / f"{name}.py").write_text(f"{code}    {body}\n")
        attnlib.register_backend(f"b{place}", f"{name}:Backend", priority=900 - place)
    imported = lambda: [name in sys.modules for name in names]  # noqa: E731
    try:
        assert _select("torch") is TorchBackend and imported() == [False, False, False]
        assert _select().get_name() == "b1" and imported() == [True, True, False]
        with pytest.raises(BackendUnavailableError, match="that support this spec here: b1, b2"):
            _select("b0")
        assert attnlib.explain(SPEC, "cpu").chosen == "b1" and imported() == [True, True, True]
    finally:
        for name in names:
            sys.modules.pop(name, None)


def test_a_name_is_registered_once() -> None:
    """X1"""
    attnlib.register_backend("other", Other)
    with pytest.raises(
        RegistrationError, match=r"'other' is already registered \(registered\).*override=True"
    ):
        attnlib.register_backend("Other", Third)
    attnlib.register_backend("other", Third, override=True)
    assert lookup("OTHER").target is Third
    with pytest.raises(RegistrationError, match="it is built in"):
        unregister_backend("torch")
    with pytest.raises(RegistrationError, match="it is not registered"):
        unregister_backend("nobody")
    for name in ("", "auto", "-x", "a,b", "prefill:x"):
        with pytest.raises(RegistrationError, match="is not a valid backend name"):
            attnlib.register_backend(name, Other)
    for nameless in (Other, None, 3):  # a class alone would be taken for a decorator's name
        with pytest.raises(RegistrationError, match="it must be the name of the backend"):
            attnlib.register_backend(nameless)
    for wrong in ({"priority": "high"}, {"priority": 1.5}, {"config": [64]}):
        with pytest.raises(RegistrationError, match="must be an? (integer|dictionary)"):
            attnlib.register_backend("wrong", Other, **wrong)
    assert lookup("wrong") is None


def test_overriding_a_built_in_backend_and_restoring_it() -> None:
    attnlib.register_backend("torch", Other, priority=100, override=True)
    assert issubclass(_select(), Other) and _select().get_name() == "torch"
    unregister_backend("torch")
    assert _select() is TorchBackend


def test_config_reaches_builder_and_impl() -> None:
    """X2"""
    attnlib.register_backend("tuned", Other, config={"tile": 64})
    backend = _select("tuned")
    assert backend.config == {"tile": 64} and issubclass(backend, Other) and Other.config == {}
    assert backend.make_builder(SPEC, "cpu").config == {"tile": 64}
    assert attnlib.Attention(SPEC, backend="tuned", device="cpu").impl.config == {"tile": 64}
    assert pickle.loads(pickle.dumps(backend)) is backend


def test_the_decorator_form_returns_the_class() -> None:
    @attnlib.register_backend("decorated")
    class Decorated(Other):
        pass

    assert Decorated.get_name() == "other" and issubclass(_select("decorated"), Decorated)


def test_every_built_in_path_leads_to_a_backend_of_that_name() -> None:
    for name in attnlib.list_backends():
        assert attnlib.selection.load_backend(name).get_name() == name


class Provided(TorchBackend):
    """The backend of a package that `provide` simulates."""

    @staticmethod
    def get_name() -> str:
        return "provided"


Provide = Callable[..., None]


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provide]:
    """Simulate a package "simulated" with these entry points (name, path)."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_plugins_read", False)
    monkeypatch.setattr(registration, "_warned", set())

    def simulate(*points: tuple[str, str]) -> None:
        found = [PluginBackend(name, path, "simulated") for name, path in points]
        monkeypatch.setattr(registry, "find_plugins", lambda: found)

    yield simulate
    registry._generation += 1  # cached selections of simulated backends must not be used again


def test_a_plugin_is_selected_by_name_and_never_by_auto(provide: Provide) -> None:
    provide(("provided", f"{__name__}:Provided"))
    assert "provided" in attnlib.list_backends() and lookup("PROVIDED").origin == "simulated"
    assert _select("provided") is Provided
    assert _select() is TorchBackend


class Ranked(Provided):
    """A backend that asks for a place in auto."""

    auto_priority = 150


def test_a_plugin_class_may_declare_a_place_in_auto(provide: Provide) -> None:
    provide(("provided", f"{__name__}:Provided"), ("ranked", f"{__name__}:Ranked"))
    assert _select().get_name() == "ranked" and issubclass(_select(), Ranked)
    by_name = {c.name: c for c in attnlib.explain(SPEC, "cpu").candidates}
    assert by_name["provided"].reasons == ("selected only by name",)
    assert by_name["torch"].reasons == ("lower priority",)


def test_a_measured_backend_without_a_place_in_auto_says_so(provide: Provide) -> None:
    provide(("provided", f"{__name__}:Provided"))
    report = decide(
        SPEC,
        DeviceInfo("cpu"),
        list(registry.registrations().values()),
        AUTO,
        lambda entry: registration.availability(entry, DeviceInfo("cpu")),
        Ranking({}, ("provided", "torch"), {"provided": 1.0, "torch": 2.0}, "a table"),
    )
    by_name = {c.name: c for c in report.candidates}
    assert report.chosen == "torch"
    assert by_name["provided"].reasons[-1] == "selected only by name"


def test_limits_are_shown_before_the_installation() -> None:
    """A user who needs another head size does not install a package in vain."""
    report = decide(
        SPEC.replace(head_size=96, dtype=torch.float16),
        DeviceInfo("cuda", capability=(9, 0)),
        [registry.registrations()["flashinfer"]],
        AUTO,
        lambda entry: (FlashInferBackend, ["flashinfer is not installed: pip install it"]),
    )
    (candidate,) = report.candidates
    assert candidate.status is SelectionStatus.UNAVAILABLE
    first, *rest = candidate.reasons
    assert first.startswith("head_size=96 not supported (supported: 64, 128, 256)")
    assert rest[-1].startswith("flashinfer is not installed")


def test_no_installation_is_advised_for_layers_of_another_kind() -> None:
    entry = registry.registrations()["flashinfer"]
    probe = (FlashInferBackend, ["flashinfer is not installed: pip install it"])
    spec = attnlib.StateSpec(num_heads=2, key_size=64, value_size=64, dtype=torch.float16)
    device = DeviceInfo("cuda", capability=(9, 0))
    (candidate,) = decide(spec, device, [entry], AUTO, lambda _: probe).candidates
    assert candidate.status is SelectionStatus.UNAVAILABLE
    assert candidate.reasons == ("serves no state layers",)


def test_a_plugin_disappears_when_plugins_are_switched_off(
    provide: Provide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ATTNLIB_PLUGINS may change at any time, also after the entry points were read."""
    provide(("ranked", f"{__name__}:Ranked"))
    assert _select().get_name() == "ranked"
    monkeypatch.setenv("ATTNLIB_PLUGINS", "0")
    assert _select().get_name() == "torch" and "ranked" not in attnlib.list_backends()
    monkeypatch.setenv("ATTNLIB_PLUGINS", "1")
    assert _select().get_name() == "ranked"


def test_one_name_for_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registered name holds, whatever the class says; suggestions are close to the request."""
    monkeypatch.setenv("ATTNLIB_PLUGINS", "0")  # an installed package may have a close name
    attnlib.register_backend("newcomer", Other)
    assert _select("newcomer").get_name() == "newcomer"
    assert pickle.loads(pickle.dumps(_select("newcomer"))) is _select("newcomer")
    with pytest.raises(UnknownBackendError) as caught:
        _select("gather")
    assert "Did you mean" not in str(caught.value) and "A class" not in str(caught.value)
    with pytest.raises(UnknownBackendError, match="A class is given as 'module:Class'"):
        _select("my_package.attention")
    with pytest.raises(UnknownBackendError, match=r"Did you mean 'newcomer'\?"):
        _select("newcommer")


def test_a_broken_plugin_causes_one_warning_with_both_names(provide: Provide) -> None:
    provide(("broken", "no_such_module_at_all:Backend"))
    pattern = "'broken' of package simulated is ignored: ModuleNotFoundError.*no_such_module"
    with pytest.warns(UserWarning, match=pattern) as caught:
        assert attnlib.explain(SPEC, "cpu").chosen == "torch"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attnlib.explain(SPEC, "cpu").reasons()["broken"][0].startswith("ModuleNotFoundError")
    with pytest.raises(BackendUnavailableError, match="no_such_module_at_all"):
        _select("broken")


@pytest.mark.parametrize("error", ["SystemExit(1)", "BaseException('stop')"])
def test_a_plugin_that_exits_at_import_does_not_stop_auto(
    error: str, provide: Provide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D16: only KeyboardInterrupt passes."""
    (tmp_path / "exiting_plugin.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    provide(("exiting", "exiting_plugin:Backend"))
    name = error.partition("(")[0]
    with pytest.warns(UserWarning, match=f"'exiting' of package simulated is ignored: {name}"):
        assert attnlib.get_attn_backend(SPEC.replace(head_size=56), device="cpu") is TorchBackend
    assert attnlib.explain(SPEC, "cpu").reasons()["exiting"][0].startswith(name)
    with pytest.raises(BackendUnavailableError, match=f"cannot be imported: {name}"):
        attnlib.selection.load_backend("exiting")


def test_a_keyboard_interrupt_passes(
    provide: Provide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupted_plugin.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    provide(("interrupted", "interrupted_plugin:Backend"))
    with pytest.raises(KeyboardInterrupt):
        attnlib.explain(SPEC, "cpu")


def test_threads_that_start_together_all_find_the_plugins(
    provide: Provide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D16: the registry counts as read only after it was read."""
    provide(("provided", f"{__name__}:Provided"))
    looked, find, found = threading.Semaphore(0), registry.find_plugins, []

    class Lock:
        """The lock of the registry; tells of every thread that asks for it."""

        def __init__(self, lock: AbstractContextManager[bool]) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            looked.release()
            self.lock.__enter__()

        def __exit__(self, *error: object) -> None:
            self.lock.__exit__(*error)

    def select() -> None:
        try:
            found.append(_select("provided"))
        except Exception as error:
            found.append(error)
        looked.release()

    others = [threading.Thread(target=select) for _ in range(3)]

    def slow_find() -> list[PluginBackend]:
        """Reads when each of the other threads waits for the lock, or has found what there is."""
        while looked.acquire(blocking=False):
            pass
        for thread in others:
            thread.start()
        for _ in others:
            looked.acquire()
        return find()

    monkeypatch.setattr(registry, "_lock", Lock(registry._lock))
    monkeypatch.setattr(registry, "find_plugins", slow_find)
    select()
    for thread in others:
        thread.join()
    assert found == [Provided] * 4


def test_names_that_are_taken_or_invalid_are_ignored(provide: Provide) -> None:
    provide(("torch", f"{__name__}:Provided"), ("auto", "a:B"), ("dotted", "a.B"))
    with pytest.warns(UserWarning) as caught:
        names = attnlib.list_backends()
    texts = " | ".join(str(warning.message) for warning in caught)
    assert (
        "backend 'torch' of package simulated is ignored: the name is already registered (built in)"
        in texts
    )
    assert "backend 'auto' = 'a:B' of package simulated is ignored" in texts
    assert "backend 'dotted' = 'a.B' of package simulated is ignored" in texts
    assert lookup("torch").origin == "built in" and not {"auto", "dotted"} & set(names)


def test_plugins_can_be_disabled(provide: Provide, monkeypatch: pytest.MonkeyPatch) -> None:
    provide(("provided", f"{__name__}:Provided"))
    monkeypatch.setenv("ATTNLIB_PLUGINS", "0")
    assert "provided" not in attnlib.list_backends()


def test_reading_the_plugins_selects_and_logs_once(
    provide: Provide, caplog: pytest.LogCaptureFixture
) -> None:
    """S2: one line, although reading the entry points changes the registry during the selection."""
    provide(("provided", f"{__name__}:Provided"))
    spec = SPEC.replace(head_size=88)
    with caplog.at_level("INFO", logger="attnlib"):
        for _ in range(3):
            attnlib.get_attn_backend(spec, device="cpu")
    assert len(caplog.records) == 1
