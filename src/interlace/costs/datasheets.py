"""Data sheets of GPUs by their makers, for guesses where nothing was measured."""

from __future__ import annotations

from typing import NamedTuple

from interlace.costs.time import MachineProfile, SizedCall


class Datasheet(NamedTuple):
    """The peak rates of a GPU.

    Attributes:
        processors: Number of streaming multiprocessors, or AMD's compute units.
        tera_flops: Dense 16-bit FLOPs per second of tensor cores with float32 sums, in 10^12.
        float32_tera_flops: Those of float32 without tensor cores.
        memory_gigabytes: Gigabytes per second that memory is read or written with.
        link_gigabytes: Gigabytes per second that leave for all peers together; PCIe's where a card
            has no other link, or one to a single peer only.
        shared_kibibytes: Shared memory that a program may have.
        architecture: The maker's name of the processors' generation.
    """

    processors: int
    tera_flops: float
    float32_tera_flops: float
    memory_gigabytes: float
    link_gigabytes: float
    shared_kibibytes: int
    architecture: str

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory that a program may have, in bytes."""
        return self.shared_kibibytes << 10


DATASHEETS = {
    "NVIDIA H200": Datasheet(132, 989, 67, 4800, 450, 227, "Hopper"),
    "NVIDIA H100 80GB HBM3": Datasheet(132, 989, 67, 3350, 450, 227, "Hopper"),
    "NVIDIA H100 NVL": Datasheet(132, 835, 60, 3900, 64, 227, "Hopper"),
    "NVIDIA H100 PCIe": Datasheet(114, 756, 51, 2000, 64, 227, "Hopper"),
    "NVIDIA H800": Datasheet(132, 989, 67, 3350, 200, 227, "Hopper"),
    "NVIDIA H20": Datasheet(78, 148, 44, 4000, 450, 227, "Hopper"),
    "NVIDIA GH200 480GB": Datasheet(132, 989, 67, 4000, 450, 227, "Hopper"),
    "NVIDIA B200": Datasheet(148, 2250, 75, 8000, 900, 227, "Blackwell"),
    "NVIDIA A100-SXM4-40GB": Datasheet(108, 312, 19.5, 1555, 300, 163, "Ampere"),
    "NVIDIA A100-SXM4-80GB": Datasheet(108, 312, 19.5, 2039, 300, 163, "Ampere"),
    "NVIDIA A100-PCIE-40GB": Datasheet(108, 312, 19.5, 1555, 32, 163, "Ampere"),
    "NVIDIA A100 80GB PCIe": Datasheet(108, 312, 19.5, 1935, 32, 163, "Ampere"),
    "NVIDIA A800-SXM4-80GB": Datasheet(108, 312, 19.5, 2039, 200, 163, "Ampere"),
    "NVIDIA L40S": Datasheet(142, 362, 91.6, 864, 32, 99, "Ada"),
    "NVIDIA L4": Datasheet(58, 121, 30.3, 300, 32, 99, "Ada"),
    "NVIDIA A40": Datasheet(84, 149.7, 37.4, 696, 32, 99, "Ampere"),
    "NVIDIA A10": Datasheet(72, 125, 31.2, 600, 32, 99, "Ampere"),
    "NVIDIA GeForce RTX 4090": Datasheet(128, 165.2, 82.6, 1008, 32, 99, "Ada"),
    "NVIDIA GeForce RTX 5090": Datasheet(170, 209.5, 104.8, 1792, 64, 99, "Blackwell"),
    "AMD Instinct MI300X": Datasheet(304, 1307, 163.4, 5300, 448, 64, "CDNA 3"),
}
"""By the name that ``torch.cuda.get_device_name`` returns."""


def least_us(profile: MachineProfile, operator: str, call: SizedCall) -> float:
    """Return the microseconds below which no call of these sizes can be, by the GPU's data sheet.

    Compositions are factors, and carry sizes far from the measured ones, and other dtypes, beyond
    what the GPU's multipliers, memory and links can do.

    Returns:
        The longest of the three times; 0 of a GPU without a data sheet.
    """
    datasheet = DATASHEETS.get(profile.gpu)
    if datasheet is None:
        return 0.0
    tera_flops = datasheet.float32_tera_flops if call.is_exact else datasheet.tera_flops
    flops = 2 * call.rows * call.columns * call.inner
    # What leaves tile by tile need not be written to this rank's own memory.
    read_bytes = call.itemsize * (call.rows + call.columns) * call.inner
    link_bytes = profile.least_link_us(operator, call) * profile.link_bytes_per_s / 1e6
    return max(
        flops / (tera_flops * 1e6),
        read_bytes / (datasheet.memory_gigabytes * 1e3),
        link_bytes / (datasheet.link_gigabytes * 1e3),
    )
