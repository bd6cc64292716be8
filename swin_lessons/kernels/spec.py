"""One launch of a kernel as a compiler sees it: types, values that it may rely on, constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

HALVES = ("fp16", "bf16")
FLOATS = ("fp32", *HALVES)


@dataclass(frozen=True)
class Spec:
    """What `compile_report` compiles.

    Attributes:
        name: of the row in the report.
        kernel: a `triton.jit` function.
        pointers: element types of pointers that do not follow the dtype of the operation, as "fp32" or "i64".
        scalars: the other arguments, with typical values: as at a launch, a multiple of 16 is known to be one.
        constants: the `tl.constexpr` arguments.
        num_warps, num_stages: as the launch gives them.
        dtypes: for which the kernel is meant.
    """

    name: str
    kernel: Any
    pointers: Mapping[str, str]
    scalars: Mapping[str, float]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    dtypes: tuple[str, ...] = FLOATS

    def changed(self, change: Mapping[str, int]) -> Spec:
        """The same kernel with other values of `constants` and of `num_warps`.

        Raises:
            ValueError: a name that is neither.
        """
        constants = dict(change)
        warps = constants.pop("num_warps", self.num_warps)
        if unknown := sorted(constants.keys() - self.constants.keys()):
            known = sorted({*self.constants, "num_warps"})
            raise ValueError(f"{self.name} has no {', '.join(unknown)}; choose from {', '.join(known)}")
        return replace(self, constants={**self.constants, **constants}, num_warps=warps)

    def source(self, dtype: str) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list]]:
        """The signature, constants and attributes for Triton's compiler, with tensors of `dtype`."""
        signature: dict[str, str] = {}
        constants = dict(self.constants)
        known: dict[tuple[int, ...], list] = {}
        for i, name in enumerate(self.kernel.arg_names):
            value = self.scalars.get(name)
            if name in self.constants or value == 1:  # a launch makes a constant of 1
                signature[name] = "constexpr"
                constants.setdefault(name, value)
            elif value is None:
                signature[name] = f"*{self.pointers.get(name, dtype)}"
                known[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    known[(i,)] = [["tt.divisibility", 16]]
        return signature, constants, known
