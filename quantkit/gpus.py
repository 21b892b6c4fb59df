"""GPUs that serve language models: memory and bandwidth of one. A table; imports nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    The number in a GPU's name is the vendor's and counts neither what ECC takes on boards with GDDR memory nor what
    the driver keeps. `gib` is what a process on it is told it has, in GiB rounded down to a tenth: the number that an
    engine multiplies by its utilization. It moves by some 0.2 GiB from driver to driver. ECC is on where that is the
    default or usual in servers.

    Attributes:
        title: as the vendor writes it.
        gib: memory, GiB.
        gb_per_s: peak memory bandwidth by the vendor, 10^9 bytes per second.
        fp8: it computes in FP8; others can keep a cache in FP8, and convert what they read.
        source: where the vendor states the bandwidth.
    """

    title: str
    gib: float
    gb_per_s: int
    fp8: bool
    source: str

    @property
    def memory(self) -> int:
        """Memory in bytes."""
        return int(self.gib * 2**30)

    @property
    def bandwidth(self) -> int:
        """Peak memory bandwidth, bytes per second."""
        return self.gb_per_s * 10**9


GPUS: dict[str, Gpu] = {
    "t4-16gb": Gpu("NVIDIA T4", 14.7, 320, False, "NVIDIA T4 datasheet"),
    "a10-24gb": Gpu("NVIDIA A10", 22.1, 600, False, "NVIDIA A10 datasheet"),
    "l4-24gb": Gpu("NVIDIA L4", 22.0, 300, True, "NVIDIA L4 datasheet"),
    "rtx-3090-24gb": Gpu("NVIDIA GeForce RTX 3090", 23.6, 936, False, "NVIDIA Ampere GA102 whitepaper"),
    "rtx-4090-24gb": Gpu("NVIDIA GeForce RTX 4090", 23.6, 1008, True, "NVIDIA Ada GPU architecture whitepaper"),
    "rtx-5090-32gb": Gpu("NVIDIA GeForce RTX 5090", 31.3, 1792, True, "NVIDIA RTX Blackwell whitepaper"),
    "a100-40gb": Gpu("NVIDIA A100 40GB", 39.3, 1555, False, "NVIDIA A100 datasheet"),
    "rtx-6000-ada-48gb": Gpu("NVIDIA RTX 6000 Ada", 44.4, 960, True, "NVIDIA RTX 6000 Ada datasheet"),
    "l40s-48gb": Gpu("NVIDIA L40S", 44.4, 864, True, "NVIDIA L40S datasheet"),
    "a100-80gb": Gpu("NVIDIA A100 SXM 80GB", 79.1, 2039, False, "NVIDIA A100 datasheet"),
    "h100-pcie-80gb": Gpu("NVIDIA H100 PCIe", 79.1, 2000, True, "NVIDIA H100 datasheet, PCIe"),
    "h100-80gb": Gpu("NVIDIA H100 SXM", 79.1, 3350, True, "NVIDIA H100 datasheet, SXM"),
    "gh200-96gb": Gpu("NVIDIA GH200 96GB", 94.5, 4000, True, "NVIDIA GH200 datasheet, HBM3"),
    "h200-141gb": Gpu("NVIDIA H200", 139.7, 4800, True, "NVIDIA H200 datasheet"),
    "b200-180gb": Gpu("NVIDIA B200", 178.3, 8000, True, "NVIDIA DGX B200 datasheet, 64 TB/s for eight"),
    "mi300x-192gb": Gpu("AMD Instinct MI300X", 191.9, 5300, True, "AMD Instinct MI300X data sheet"),
    "mi325x-256gb": Gpu("AMD Instinct MI325X", 255.9, 6000, True, "AMD Instinct MI325X data sheet"),
}
