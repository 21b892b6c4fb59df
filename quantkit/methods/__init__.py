"""Quantization methods by the names users type."""

from __future__ import annotations

from quantkit.methods.awq import Awq, AwqGptq
from quantkit.methods.base import Method
from quantkit.methods.gptq import Gptq
from quantkit.methods.rtn import Rtn

METHODS: dict[str, Method] = {
    "rtn": Rtn(),
    "gptq": Gptq(),
    "awq": Awq(),
    "awq+gptq": AwqGptq(),
    "none": Rtn(),  # never asked: under this name a plan has nothing to round
}
