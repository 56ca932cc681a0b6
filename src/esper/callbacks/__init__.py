"""Growth in the trainers of Lightning and Hugging Face: callbacks around `esper.Growth`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.callbacks.hugging_face import HuggingFaceGrowth
    from esper.callbacks.lightning import LightningGrowth

__all__ = ["HuggingFaceGrowth", "LightningGrowth"]


def __getattr__(name: str) -> Any:
    """A callback, which imports its trainer. InputError if the package of the trainer is not installed."""
    if name == "LightningGrowth":
        from esper.callbacks.lightning import LightningGrowth

        return LightningGrowth
    if name == "HuggingFaceGrowth":
        from esper.callbacks.hugging_face import HuggingFaceGrowth

        return HuggingFaceGrowth
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
