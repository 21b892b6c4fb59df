"""Shapes and configs of models for the engines' rules, and what the text of a hint asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quantkit.check import Judgement, judge
from quantkit.patterns import match
from quantkit.scheme import Scheme

Shapes = dict[str, tuple[int, int]]
OPTION = re.compile(r"--(group-size|tp|format|symmetric|bits|ignore)(?: '?([^\s'`]+)'?)?")


def attention(layer: str, hidden: int, heads: int, kv: int, head: int) -> Shapes:
    return {
        f"{layer}.self_attn.q_proj": (heads * head, hidden),
        f"{layer}.self_attn.k_proj": (kv * head, hidden),
        f"{layer}.self_attn.v_proj": (kv * head, hidden),
        f"{layer}.self_attn.o_proj": (hidden, heads * head),
    }


def feed_forward(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}.gate_proj": (width, hidden),
        f"{prefix}.up_proj": (width, hidden),
        f"{prefix}.down_proj": (hidden, width),
    }


@dataclass(frozen=True)
class Question:
    """A model, how it is quantized, and for which engine."""

    hidden: int = 256
    width: int = 512
    heads: int = 4
    kv: int = 4
    head: int = 64
    layers: int = 2
    experts: int = 0
    scheme: Scheme = field(default_factory=Scheme)
    format: str = "compressed-tensors"
    target: str = "vllm"
    tp: int = 1
    dtype: str = "bfloat16"
    ignore: tuple[str, ...] = ()
    stored: bool = False
    quirks: frozenset[str] = frozenset()

    @property
    def shapes(self) -> Shapes:
        found: Shapes = {}
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            found |= attention(layer, self.hidden, self.heads, self.kv, self.head)
            names = [f"{layer}.mlp.experts.{each}" for each in range(self.experts)] or [f"{layer}.mlp"]
            for name in names:
                found |= feed_forward(name, self.hidden, self.width)
        return found

    @property
    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "dtype": self.dtype,
        }

    @property
    def schemes(self) -> dict[str, Scheme | None]:
        return {name: None if any(match(each, name) for each in self.ignore) else self.scheme for name in self.shapes}

    def ask(self, schemes: dict[str, Scheme | None] | None = None) -> Judgement:
        return judge(
            self.shapes,
            self.schemes if schemes is None else schemes,
            self.format,
            self.target,
            tp=self.tp,
            config=self.config,
            stored=self.stored,
            quirks=self.quirks,
        )

    def with_hint(self, choice: str) -> Question:
        """The question with the options of one choice of a hint."""
        asked = self
        for option, value in OPTION.findall(choice):
            if option == "group-size":
                asked = replace(asked, scheme=replace(asked.scheme, group_size=int(value)))
            elif option == "bits":
                asked = replace(asked, scheme=replace(asked.scheme, bits=int(value)))
            elif option == "symmetric":
                asked = replace(asked, scheme=replace(asked.scheme, symmetric=True))
            elif option == "tp":
                asked = replace(asked, tp=int(value))
            elif option == "ignore" and value:
                asked = replace(asked, ignore=(*asked.ignore, value))
            elif option == "format":  # converted, so written anew
                asked = replace(asked, format=value, stored=False, quirks=frozenset())
        return asked


def choices(hint: str) -> Iterator[str]:
    """The choices of a hint that name options and their values."""
    for choice in re.split(r", or |; ", hint):
        if any(value or option == "symmetric" for option, value in OPTION.findall(choice)):
            yield choice
