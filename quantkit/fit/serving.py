"""What a model takes of a GPU while it serves: weights, KV cache, the sequences that fit, and a bound on decoding.

Arithmetic on sizes; nothing here is measured, and no file is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.errors import UsageError
from quantkit.gpus import Gpu

PAGE = 16  # tokens of a block of the cache in vLLM
RESERVE = 1_500_000_000  # bytes of each GPU for activations, CUDA graphs and the runtime
CACHES = {"16-bit": 2, "FP8": 1}  # bytes of an element


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model's weights by what happens to them in a decode step.

    Attributes:
        blocks: in the decoder blocks, read whole but for the experts.
        experts: those of `blocks` that belong to routed experts.
        head: the matrix of the logits, read whole; a tied one is counted here and only here.
        other: the rest: input embedding, of which single rows are read, final norm, towers of other modalities.
        vectors: those of all these that every GPU holds a copy of.
    """

    blocks: int
    experts: int
    head: int
    other: int
    vectors: int

    @property
    def total(self) -> int:
        """All weights."""
        return self.blocks + self.head + self.other

    def per_gpu(self, gpus: int) -> int:
        """What each of `gpus` tensor-parallel ranks holds: its part of the matrices, all vectors.

        Projections of keys and values that are replicated, with more ranks than heads, count once.
        """
        return self.vectors + math.ceil((self.total - self.vectors) / gpus)

    def read(self, batch: int, routing: Routing | None) -> float:
        """Bytes that one decode step of a batch reads, on all GPUs together."""
        share = routing.share(batch) if routing else 1.0
        return self.blocks - self.experts * (1 - share) + self.head


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of a layer, and how many a token uses."""

    experts: int
    active: int

    def share(self, batch: int) -> float:
        """Expected part of the experts that a batch uses, if each token drew its own evenly: 1 - (1 - k/E)^b."""
        return 1 - (1 - self.active / self.experts) ** batch


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of one sequence.

    Attributes:
        layers: {tokens that a layer keeps at most, None for all: layers}; layers without a cache are left out.
        heads: key/value heads; 1 for a latent that all heads share (MLA).
        width: elements per head and token: 2 * head_dim, or kv_lora_rank + qk_rope_head_dim of a latent.
    """

    layers: Mapping[int | None, int]
    heads: int
    width: int

    def per_token(self, itemsize: int, gpus: int = 1) -> int:
        """Bytes of one token in all layers on one GPU; a rank has at least one head, so heads may be replicated."""
        return sum(self.layers.values()) * math.ceil(self.heads / gpus) * self.width * itemsize

    def per_sequence(self, context: int, itemsize: int, gpus: int = 1, page: int = PAGE) -> int:
        """Bytes of a sequence of `context` tokens on one GPU, in whole pages of `page` tokens."""
        kept = {window: context if window is None else min(context, window) for window in self.layers}
        tokens = sum(count * math.ceil(kept[window] / page) * page for window, count in self.layers.items())
        return tokens * math.ceil(self.heads / gpus) * self.width * itemsize


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's sizes, whatever it runs on.

    Attributes:
        parameters: of the plain model, tied ones once.
        weights: {how they are kept: footprint}, 16-bit first, then quantized.
        packing: what the quantized weights are, in words.
        heads: query heads.
        positions: longest sequence the config allows, if it says so.
        notes: what the numbers leave out or assume.
    """

    parameters: int
    weights: Mapping[str, Footprint]
    packing: str
    cache: CacheShape
    heads: int
    routing: Routing | None
    positions: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served. Raises UsageError for numbers that are none.

    Attributes:
        context: tokens of each sequence, prompt and answer.
        concurrency: sequences at a time.
        gpus: tensor-parallel ranks.
        utilization: part of the memory that the engine may use.
    """

    context: int = 8192
    concurrency: int = 32
    gpus: int = 1
    utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("context", "concurrency", "gpus"):
            if getattr(self, name) < 1:
                raise UsageError(f"`--{name} {getattr(self, name)}` is less than 1", "pass a positive number")
        if not 0 < self.utilization <= 1:
            raise UsageError(f"`--utilization {self.utilization}` is no part of the memory", "pass 0.9, say")

    def room(self, gpu: Gpu) -> int:
        """Bytes of one GPU for weights and cache."""
        return int(gpu.memory * self.utilization) - RESERVE


@dataclass(frozen=True, slots=True)
class Fit:
    """One way of keeping weights and cache on a GPU. Sizes are bytes on each GPU.

    Attributes:
        weights, cache: how they are kept.
        cache_bytes: of all sequences asked for.
        sequences: how many fit beside the weights; 0 when the weights do not fit.
        batch: how many run at a time: those asked for, as far as they fit.
        single, batched: bounds on the tokens per second of one sequence, and of `batch` together; 0.0 if none fits.
    """

    weights: str
    cache: str
    weight_bytes: int
    cache_bytes: int
    weights_fit: bool
    sequences: int
    batch: int
    single: float
    batched: float


def fit(sizes: Sizes, load: Load, gpu: Gpu) -> tuple[Fit, ...]:
    """Fit a model in 16 bit and quantized, with a cache in 16 bit and in FP8.

    A decode step reads the weights once and the cache of every sequence, so that
    tokens/s <= batch * bandwidth / (weights + batch * cache of a sequence).

    Raises:
        UsageError: the heads cannot be divided over so many GPUs.
    """
    if sizes.heads % load.gpus:
        possible = ", ".join(str(n) for n in range(1, 17) if sizes.heads % n == 0)
        raise UsageError(
            f"`--gpus {load.gpus}` does not divide the model's {sizes.heads} attention heads", f"choose from {possible}"
        )
    return tuple(_fit(sizes, load, gpu, weights, cache) for weights in sizes.weights for cache in CACHES)


def _fit(sizes: Sizes, load: Load, gpu: Gpu, weights: str, cache: str) -> Fit:
    footprint, itemsize = sizes.weights[weights], CACHES[cache]
    held = footprint.per_gpu(load.gpus)
    sequence = sizes.cache.per_sequence(load.context, itemsize, load.gpus)
    free = load.room(gpu) - held
    sequences = max(free, 0) // sequence

    def bound(batch: int) -> float:
        read = footprint.read(batch, sizes.routing) / load.gpus
        read += batch * sizes.cache.per_sequence(load.context, itemsize, load.gpus, page=1)
        return batch * gpu.bandwidth / read

    batch = min(sequences, load.concurrency)
    return Fit(
        weights,
        cache,
        held,
        load.concurrency * sequence,
        free >= 0,
        sequences,
        batch,
        bound(1) if batch else 0.0,
        bound(batch) if batch else 0.0,
    )
