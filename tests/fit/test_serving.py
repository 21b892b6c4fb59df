"""What fits a GPU and how fast it can decode at most, against arithmetic done here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fit.configs import LLAMA_70B, folder
from quantkit.errors import UsageError
from quantkit.fit.measure import measure
from quantkit.fit.serving import CacheShape, Fit, Footprint, Load, Routing, Sizes, fit
from quantkit.gpus import GPUS, Gpu

GPU = Gpu("a GPU", 100.0, 1000, True, "nowhere")
SMALL = Footprint(blocks=8_000_000_000, experts=0, head=1_000_000_000, other=1_000_000_000, vectors=1_000_000)
SIZES = Sizes(10**10, {"16-bit": SMALL, "4-bit": SMALL}, "", CacheShape({None: 10}, 8, 256), 32, None, None, ())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Sizes:
    return measure(folder(tmp_path_factory.mktemp("llama"), LLAMA_70B))


def by_kind(fits: tuple[Fit, ...]) -> dict[tuple[str, str], Fit]:
    return {(each.weights, each.cache): each for each in fits}


def test_seventy_billion_parameters_on_one_gpu(llama: Sizes) -> None:
    """One H200: 139.7 GiB, of which an engine takes 0.9."""
    found = by_kind(fit(llama, Load(context=8192, concurrency=32), GPUS["h200-141gb"]))
    room = int(139.7 * 2**30) * 0.9 - 1.5e9
    weights, sequence = 39_500_398_592, 8192 * 327_680

    assert list(found) == [("16-bit", "16-bit"), ("16-bit", "FP8"), ("4-bit", "16-bit"), ("4-bit", "FP8")]
    whole, packed, eight = found["16-bit", "16-bit"], found["4-bit", "16-bit"], found["4-bit", "FP8"]
    assert not whole.weights_fit and (whole.sequences, whole.batch, whole.single, whole.batched) == (0, 0, 0.0, 0.0)
    assert packed.weight_bytes == weights
    assert packed.cache_bytes == 32 * sequence == 2 * eight.cache_bytes
    assert packed.sequences == (room - weights) // sequence == 35
    assert eight.sequences == (room - weights) // (sequence / 2) == 70


def test_the_bound_on_decoding(llama: Sizes) -> None:
    """A step reads the blocks and the head once, and what every sequence has cached; not the input embedding."""
    found = by_kind(fit(llama, Load(context=8192, concurrency=32), GPUS["h200-141gb"]))["4-bit", "16-bit"]
    blocks, head, sequence = 35_297_689_600, 128_256 * 8192 * 2, 8192 * 327_680

    assert found.single == pytest.approx(4.8e12 / (blocks + head + sequence))
    assert found.batched == pytest.approx(32 * 4.8e12 / (blocks + head + 32 * sequence))
    assert 119 < found.single < 120


def test_a_batch_is_what_fits(llama: Sizes) -> None:
    found = by_kind(fit(llama, Load(context=8192, concurrency=100), GPUS["h200-141gb"]))["4-bit", "16-bit"]

    assert (found.sequences, found.batch) == (35, 35)
    assert found.cache_bytes == 100 * 8192 * 327_680


def test_the_cache_is_read_by_the_token_and_held_by_the_page() -> None:
    found = fit(SIZES, Load(context=17, concurrency=1), GPU)[0]

    assert found.cache_bytes == 32 * 10 * 8 * 256 * 2
    assert found.single == pytest.approx(1e12 / (9e9 + 17 * 10 * 8 * 256 * 2))


def test_ranks_divide_matrices_heads_and_reading(llama: Sizes) -> None:
    found = by_kind(fit(llama, Load(context=8192, concurrency=32, gpus=4), GPUS["h100-80gb"]))["16-bit", "16-bit"]
    vectors = 2 * (80 * 2 + 1) * 8192

    assert found.weight_bytes == vectors + math.ceil((141_107_412_992 - vectors) / 4)
    assert found.cache_bytes == 32 * 8192 * 327_680 // 4
    assert found.single == pytest.approx(3.35e12 * 4 / (136_904_704_000 + 2_101_346_304 + 8192 * 327_680))


def test_more_ranks_than_key_heads_hold_one_each() -> None:
    found = fit(SIZES, Load(context=16, concurrency=1, gpus=16), GPU)[0]

    assert found.cache_bytes == 16 * 10 * 1 * 256 * 2


@pytest.mark.parametrize(("gpus", "possible"), [(3, "1, 2, 4, 8, 16"), (64, "1, 2, 4, 8, 16")])
def test_heads_that_do_not_divide(gpus: int, possible: str) -> None:
    with pytest.raises(UsageError, match=f"`--gpus {gpus}` does not divide the model's 32 attention heads") as caught:
        fit(SIZES, Load(gpus=gpus), GPU)

    assert caught.value.hint == f"choose from {possible}"


@pytest.mark.parametrize(("batch", "share"), [(1, 2 / 8), (2, 1 - (6 / 8) ** 2), (64, 1 - (6 / 8) ** 64)])
def test_a_batch_uses_a_part_of_the_experts(batch: int, share: float) -> None:
    footprint = Footprint(blocks=100, experts=80, head=10, other=10, vectors=1)

    assert Routing(8, 2).share(batch) == pytest.approx(share)
    assert footprint.read(batch, Routing(8, 2)) == pytest.approx(20 + 80 * share + 10)
    assert footprint.read(batch, None) == 110


def test_the_bound_counts_the_experts_that_a_batch_uses() -> None:
    footprint = replace(SMALL, experts=6_000_000_000)
    sizes = replace(SIZES, weights={"16-bit": footprint}, routing=Routing(8, 2))
    found = fit(sizes, Load(context=16, concurrency=4), GPU)[0]
    cache, used = 16 * 10 * 8 * 256 * 2, 1 - (6 / 8) ** 4

    assert found.single == pytest.approx(1e12 / (2e9 + 6e9 / 4 + 1e9 + cache))
    assert found.batched == pytest.approx(4e12 / (2e9 + 6e9 * used + 1e9 + 4 * cache))


def test_weights_may_fit_and_no_sequence_with_them() -> None:
    tight = Gpu("tight", (SMALL.total + 1.5e9 + 1e6) / 2**30, 1000, False, "nowhere")
    found = fit(SIZES, Load(context=8192, utilization=1.0), tight)[0]

    assert (found.weights_fit, found.sequences, found.batch, found.single) == (True, 0, 0, 0.0)


@pytest.mark.parametrize(
    "numbers", [{"context": 0}, {"concurrency": 0}, {"gpus": -1}, {"utilization": 0.0}, {"utilization": 1.01}]
)
def test_numbers_that_are_none(numbers: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"`--{next(iter(numbers))} "):
        Load(**numbers)  # type: ignore[arg-type]


@given(
    context=st.integers(1, 100_000),
    concurrency=st.integers(1, 300),
    gpus=st.sampled_from([1, 2, 4, 8, 16, 32]),
    gpu=st.sampled_from(sorted(GPUS)),
    heads=st.sampled_from([1, 2, 8, 32]),
    window=st.sampled_from([None, 512]),
)
def test_what_fits_does_fit_and_one_more_does_not(
    context: int, concurrency: int, gpus: int, gpu: str, heads: int, window: int | None
) -> None:
    sizes = replace(SIZES, cache=CacheShape({window: 20, None: 3} if window else {None: 23}, heads, 256))
    load = Load(context, concurrency, gpus)
    wide, eight, *_ = fit(sizes, load, GPUS[gpu])

    for each, itemsize in ((wide, 2), (eight, 1)):
        sequence = sizes.cache.per_sequence(context, itemsize, gpus)
        used = each.weight_bytes + each.sequences * sequence
        assert not each.weights_fit or used <= load.room(GPUS[gpu]) < used + sequence
        assert each.batch == min(each.sequences, concurrency)
        assert each.batched >= each.single * (1 - 1e-9)
        assert each.batched <= each.batch * each.single * (1 + 1e-9)
    assert eight.sequences >= 2 * wide.sequences
    assert gpus * wide.weight_bytes >= SMALL.total


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_of_the_table(name: str) -> None:
    gpu = GPUS[name]
    gigabytes = int(name.rpartition("-")[2].removesuffix("gb"))

    assert name == name.lower()
    assert 0.88 * gigabytes < gpu.gib <= 1.0 * gigabytes
    assert gpu.memory < 1.08 * gigabytes * 10**9
    assert 300 <= gpu.gb_per_s <= 8000
    assert gpu.title and gpu.source
