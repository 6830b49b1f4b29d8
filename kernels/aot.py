"""Every Triton kernel compiled ahead of time, without a GPU: registers, spills and shared memory per target.

A file of Triton kernels is called kernels/<op>_triton.py and lists, in a function `launches()`, each kernel
in each configuration it may be launched with; this file finds them by name. Compiling is impossible in a
process whose kernels are interpreted (TRITON_INTERPRET=1), so the tests start this file as a process:

    python -m spectrain.kernels.aot            the table of docs/kernels.md
    python -m spectrain.kernels.aot --json     one JSON object per kernel, configuration and target

Knows no kernel.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # bytes of one block


@dataclass(frozen=True)
class Launch:
    """One way in which a kernel is launched.

    signature: the run-time arguments in order, name -> Triton type ("*bf16", "i32", "fp32"); "i32:16" is an
    integer divisible by 16. Pointers count as aligned to 16 bytes. constants: the tl.constexpr arguments.
    label: what tells it from the kernel's other launches, as "bf16, head dim 64, 128 x 64".
    """

    kernel: Any
    label: str
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@dataclass(frozen=True)
class Compiled:
    """What a launch needs on a target: registers per thread (gfx942: vector registers), bytes of a thread's
    registers that went to memory (gfx942: their number), bytes of shared memory of a block."""

    kernel: str
    label: str
    target: str
    num_warps: int
    num_stages: int
    registers: int
    spills: int
    shared: int

    @property
    def fits(self) -> bool:
        """Whether a block's shared memory suffices; autotuning passes over what does not fit."""
        return self.shared <= SHARED_LIMIT[self.target]


def launches() -> Iterator[Launch]:
    """Those of every kernels/*_triton.py."""
    for path in sorted(Path(__file__).parent.glob("*_triton.py")):
        yield from import_module(f"spectrain.kernels.{path.stem}").launches()


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Raises what the compiler raises."""
    aligned = [["tt.divisibility", 16]]
    order = launch.kernel.arg_names
    attrs = {
        (order.index(name),): aligned
        for name, kind in launch.signature.items()
        if kind.startswith("*") or kind.endswith(":16")
    }
    types = {name: kind.removesuffix(":16") for name, kind in launch.signature.items()}
    signature = {name: types.get(name, "constexpr") for name in order}
    assert set(order) == set(types) | set(launch.constants), f"{launch.name}: {order} against {launch}"
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=launch.constants, attrs=attrs)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=TARGETS[target], options=options)
    registers, spills = _amd(built.asm) if "amdgcn" in built.asm else _nvidia(built.asm)
    return Compiled(
        launch.name, launch.label, target, launch.num_warps, launch.num_stages,
        registers, spills, built.metadata.shared,
    )  # fmt: skip


def _nvidia(asm) -> tuple[int, int]:
    """(registers, bytes of stack, which our kernels use for spilled registers alone)."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _amd(asm) -> tuple[int, int]:
    """(vector registers, how many of them spilled)."""
    count, spilled = (
        re.search(rf"\.{key}:\s+(\d+)", asm["amdgcn"]) for key in ("vgpr_count", "vgpr_spill_count")
    )
    assert count and spilled, asm["amdgcn"][-2000:]
    return int(count[1]), int(spilled[1])


def table(compiled: list[Compiled]) -> str:
    """docs/kernels.md."""
    lines = [
        "# Kernels, compiled ahead of time",
        "",
        "Written by `python -m spectrain.kernels.aot > docs/kernels.md`; nothing here was run on a GPU. "
        f"Triton {triton.__version__}.",
        "Each cell: registers per thread / spilled (bytes; gfx942: vector registers) / KiB of shared memory,",
        "or a dash where shared memory does not suffice, which autotuning passes over.",
        "",
        f"| kernel | launch | warps | stages | {' | '.join(TARGETS)} |",
        "| --- | --- | ---: | ---: |" + " ---: |" * len(TARGETS),
    ]
    rows: dict[tuple, dict[str, str]] = {}
    for c in compiled:
        cell = f"{c.registers} / {c.spills} / {c.shared / 1024:.1f}" if c.fits else "-"
        rows.setdefault((c.kernel, c.label, c.num_warps, c.num_stages), {})[c.target] = cell
    for (kernel, *rest), cells in rows.items():
        lines.append(f"| `{kernel}` | {' | '.join(map(str, [*rest, *cells.values()]))} |")
    return "\n".join(lines)


def main() -> None:
    compiled = []
    for launch in launches():
        for target in TARGETS:
            compiled.append(compile_launch(launch, target))
            if "--json" in sys.argv:
                print(json.dumps(asdict(compiled[-1])), flush=True)
    if "--json" not in sys.argv:
        print(table(compiled))


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, f"TRITON_INTERPRET={os.environ['TRITON_INTERPRET']}"
    main()
