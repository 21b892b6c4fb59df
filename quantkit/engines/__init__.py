"""Serving engines by name. A new one is a file here and a row below. Imports no torch."""

from __future__ import annotations

from quantkit.engines.base import Engine
from quantkit.engines.sglang import SGLANG
from quantkit.engines.tensorrt_llm import TENSORRT_LLM
from quantkit.engines.tgi import TGI
from quantkit.engines.transformers import TRANSFORMERS
from quantkit.engines.vllm import VLLM

ENGINES: dict[str, Engine] = {each.name: each for each in (VLLM, SGLANG, TGI, TENSORRT_LLM, TRANSFORMERS)}

__all__ = ["ENGINES", "Engine"]
