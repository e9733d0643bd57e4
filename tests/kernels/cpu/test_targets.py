"""Compilation for CPUs that are not here: code is emitted, which only such a CPU can run."""

import itertools

import llvmlite.binding as llvm
import pytest

from penstock.kernels.cpu import compiler
from penstock.kernels.cpu.llvm_decoder import Kinds, build_module
from penstock.kernels.cpu.llvm_products import IntegerKind
from penstock.kernels.cpu.llvm_step import build_step
from penstock.kernels.cpu.types import DeltaShape, HeadShape

INTEGERS = Kinds((IntegerKind(4, 128, has_shift=True), IntegerKind(8, 32), "f16"), "f16", "f32")
CPUS = {
    "apple-m1": ("arm64-apple-darwin23", "+dotprod", False),
    "cortex-a72": ("aarch64-unknown-linux-gnu", "", False),
    "neoverse-n1": ("aarch64-unknown-linux-gnu", "+dotprod", False),
    "haswell": ("x86_64-unknown-linux-gnu", "+avx2", False),
    "alderlake": ("x86_64-unknown-linux-gnu", "+avx2,+avxvnni", False),
    "skylake-avx512": ("x86_64-unknown-linux-gnu", "+avx2", True),
    "znver4": ("x86_64-unknown-linux-gnu", "+avx2,+avx512vnni", True),
}
"""name → triple, features, whether vectors have 16 float32"""

KINDS = Kinds(("bf16",), "bf16", "bf16"), INTEGERS
QUICK = ("neoverse-n1", INTEGERS), ("skylake-avx512", KINDS[0])
COMBINATIONS = [
    pytest.param(*one, marks=pytest.mark.slow if one in QUICK else pytest.mark.long)
    for one in itertools.product(CPUS, KINDS)
]
"""both architectures and both kinds; all of them in `make test-long`"""


@pytest.mark.parametrize(("name", "kinds"), COMBINATIONS)
def test_code_is_emitted_for(name: str, kinds: Kinds) -> None:
    triple, features, has_wide_registers = CPUS[name]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    cpu = compiler.target(name, features, has_wide_registers)
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=name, features=cpu.features.strip(","), opt=2
    )
    sizes = HeadShape(256, 2, 64, gated=True), DeltaShape(2, 4, 128, 128, 4, 9)
    sources = str(build_module(cpu, kinds, *sizes)), str(build_step(cpu))
    for source, functions in zip(
        sources, ({"embed", "head", "decoder"}, {"apply_plan", "sample"}), strict=True
    ):
        code = compiler.compile_object(source, machine)
        missing = {name for name in functions if name.encode() not in code}
        assert not missing
