"""What an operation has to move and to compute: the numbers to predict with before anything runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """One operation, as separate PyTorch operations (before) and as one kernel (after).

    Attributes:
        launches_before, launches_after: kernels started.
        bytes_before, bytes_after: read from and written to memory, every tensor once a kernel that touches it.
        flops: additions and multiplications, the same for both.
    """

    launches_before: int
    launches_after: int
    bytes_before: int
    bytes_after: int
    flops: int

    @property
    def saving(self) -> float:
        """How many times fewer bytes: the speed-up to expect while memory is the limit."""
        return self.bytes_before / self.bytes_after
