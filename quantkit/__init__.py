"""Quantize language models to 4 bits, and prove that the result is good.

The names below are loaded on first use, so that importing quantkit imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.eval.compare import compare, kl
    from quantkit.eval.perplexity import perplexity
    from quantkit.eval.perplexity import perplexity as evaluate
    from quantkit.inspection import inspect
    from quantkit.pipeline import quantize
    from quantkit.recipe import Recipe
    from quantkit.runtime import load
    from quantkit.scheme import Scheme

__version__ = "0.1.0"

_HOMES = {
    "quantize": ("quantkit.pipeline", "quantize"),
    "perplexity": ("quantkit.eval.perplexity", "perplexity"),
    "evaluate": ("quantkit.eval.perplexity", "perplexity"),
    "kl": ("quantkit.eval.compare", "kl"),
    "compare": ("quantkit.eval.compare", "compare"),
    "load": ("quantkit.runtime", "load"),
    "inspect": ("quantkit.inspection", "inspect"),
    "Recipe": ("quantkit.recipe", "Recipe"),
    "Scheme": ("quantkit.scheme", "Scheme"),
}

__all__ = [
    "Recipe",
    "Scheme",
    "__version__",
    "compare",
    "evaluate",
    "inspect",
    "kl",
    "load",
    "perplexity",
    "quantize",
]


def __getattr__(name: str) -> object:
    """Load a public name (PEP 562)."""
    try:
        module, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module `quantkit` has no attribute `{name}`") from None
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
