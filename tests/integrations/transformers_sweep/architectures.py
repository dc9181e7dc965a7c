"""The architectures that the auto classes of the installed transformers know."""

from __future__ import annotations

from typing import NamedTuple

from transformers.models.auto import modeling_auto as auto

__all__ = ["KINDS", "Architecture", "architectures"]


class Architecture(NamedTuple):
    """One architecture.

    Attributes:
        kind: a key of `KINDS`.
        model_type: key of the configuration.
        class_name: the class that the auto class creates.
    """

    kind: str
    model_type: str
    class_name: str


KINDS: dict[str, tuple[str, ...]] = {
    "decoder": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "encoder-decoder": (
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    ),
    "vision-language": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
    "encoder": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES"),
}
"""Auto mappings by kind. Of `AutoModel`, those model types that no other mapping has."""


def architectures() -> list[Architecture]:
    """All architectures, each class once of each kind."""
    found: dict[tuple[str, str], Architecture] = {}
    types: set[str] = set()
    for kind, mappings in KINDS.items():
        for mapping in mappings:
            names = getattr(auto, mapping)
            if mapping == "MODEL_MAPPING_NAMES":
                names = {key: value for key, value in names.items() if key not in types}
            for model_type, name in names.items():
                types.add(model_type)
                name = name[0] if isinstance(name, tuple) else name
                one = Architecture(kind, model_type, name)
                if (kind, name) not in found or _is_named_after(one):
                    found[kind, name] = one
    return list(found.values())


def _is_named_after(one: Architecture) -> bool:
    """Whether the class has the name of the model type: `llama` rather than `internlm3`."""
    prefix = one.model_type.replace("_", "").replace("-", "").lower()
    return one.class_name.lower().startswith((f"{prefix}for", f"{prefix}model", f"{prefix}lm"))
