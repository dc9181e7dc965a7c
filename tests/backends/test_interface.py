"""Classes that do not fit the interface are refused with the reason."""

import dataclasses
from typing import Any

import pytest

import attnlib
from attnlib.backends.interface import check_backend_interface
from attnlib.backends.torch import TorchBackend
from attnlib.errors import RegistrationError
from attnlib.selection import load_backend
from attnlib.selection.current import current_request
from attnlib.selection.registry import unregister_backend


class Other(TorchBackend):
    """The torch backend under another name."""

    @staticmethod
    def get_name() -> str:
        return "other"


def test_classes_that_do_not_fit_are_rejected_with_the_reason() -> None:
    """Registration checks the class, so that the author sees the error, not the user."""

    class NoImpl(attnlib.AttentionBackend):
        capabilities = TorchBackend.capabilities

        @staticmethod
        def get_name() -> str:
            return "noimpl"

    with pytest.raises(RegistrationError, match="lacks get_impl_cls: define it as"):
        attnlib.register_backend("x", NoImpl)
    with pytest.raises(RegistrationError, match="must be a subclass of attnlib.AttentionBackend"):
        attnlib.register_backend("x", int)  # type: ignore[call-overload]

    class BadImpl(TorchBackend.get_impl_cls()):
        def forward(self, q, cache, metadata, output, lse=None):
            pass

    with pytest.raises(
        RegistrationError, match=r"forward\(self, q, cache.*attnlib calls forward\(self, query"
    ):
        attnlib.register_backend(
            "x", type("Bad", (Other,), {"get_impl_cls": staticmethod(lambda: BadImpl)})
        )
    with pytest.raises(RegistrationError, match="must be a subclass of attnlib.AttentionMetadata"):
        attnlib.register_backend(
            "x", type("Bad", (Other,), {"get_metadata_cls": staticmethod(lambda: int)})
        )
    with pytest.raises(RegistrationError, match="write it as 'package.module:Class'"):
        attnlib.register_backend("x", "package.module.Class")


def test_metadata_that_is_a_plain_dataclass_is_rejected() -> None:
    """D25: torch.compile needs the handle that `AttentionMetadata` provides."""

    @dataclasses.dataclass
    class Plain:
        num_tokens: int = 0

    backend = type("Bad", (Other,), {"get_metadata_cls": staticmethod(lambda: Plain)})
    with pytest.raises(RegistrationError, match="must be a subclass of attnlib.AttentionMetadata"):
        check_backend_interface(backend, "bad")


class _Reordered(TorchBackend.get_builder_cls()):
    """Its result is that of another call."""

    def build(self, common_attn_metadata, common_prefix_len=0, fast_build=False):
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class _Short(TorchBackend.get_builder_cls()):
    def build(self, common_attn_metadata):
        return super().build(0, common_attn_metadata)


class _Named(TorchBackend.get_builder_cls()):
    def build(self, *, common_prefix_len, common_attn_metadata, fast_build=False):
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class _Any(TorchBackend.get_builder_cls()):
    def build(self, *args: Any, **kwargs: Any) -> Any:
        return super().build(*args, **kwargs)


@pytest.mark.parametrize("builder", [_Reordered, _Short, _Named, int, _Any])
def test_builders_with_another_build_are_refused(builder: type) -> None:
    """A TypeError of Python would name the method, at the first batch."""
    backend = type("Bad", (Other,), {"get_builder_cls": staticmethod(lambda: builder)})
    if builder is _Any:
        return check_backend_interface(backend, "any")
    match = r"build\(self.*attnlib calls build\(self, common_prefix_len.*keep names and order"
    if builder is int:
        match = "must return a subclass of attnlib.AttentionMetadataBuilder"
    with pytest.raises(RegistrationError, match=match):
        check_backend_interface(backend, "bad")


class _PlainImpl:
    """Not an AttentionImpl."""


class Misfit(Other):
    """A backend whose impl does not fit the interface."""

    @staticmethod
    def get_impl_cls():
        return _PlainImpl


@pytest.mark.parametrize("source", ["argument", "class", "ATTNLIB_BACKEND", "registered path"])
def test_every_request_checks_the_interface(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that registration refuses is refused wherever it is requested."""
    path = f"{__name__}:Misfit"
    with pytest.raises(RegistrationError, match="must return a subclass of attnlib.AttentionImpl"):
        if source == "registered path":
            attnlib.register_backend("misfit", path)
            try:
                load_backend("misfit")
            finally:
                unregister_backend("misfit")
        elif source == "ATTNLIB_BACKEND":
            monkeypatch.setenv(source, path)
            current_request(None)
        else:
            current_request(path if source == "argument" else Misfit)
