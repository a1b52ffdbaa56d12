"""tokenmill: compress, plan, serve, scale and measure large language models.

`LLM` and the like are loaded on first use, so that importing a pure room never loads numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .core.request import SamplingParams
    from .llm.async_llm import AsyncLLM
    from .llm.llm import LLM
    from .text.beams import BeamSearchParams

__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from .llm.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from .llm.async_llm import AsyncLLM

        return AsyncLLM
    if name == "BeamSearchParams":
        from .text.beams import BeamSearchParams

        return BeamSearchParams
    if name == "SamplingParams":
        from .core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
