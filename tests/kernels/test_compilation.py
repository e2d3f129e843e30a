"""Compilation of every kernel, in every configuration that tuning may choose, for its GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux only")

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from warmprefix_kernels.context_distance import triton as distance
from warmprefix_kernels.top_overlap import triton as overlap

SEARCH = {"starts": "*i64", "shifts": "*i64", "rows": "*i32", "members": "*i32", "first": "i32", "entries": "i32",
          "steps": "i32", "begin": "i64", "end": "i64", "size": "i32"}
ALIGNED = [["tt.divisibility", 16]]
compiled = []

def compile_all(kernel, types, **constants):
    for config in kernel.configs:
        chosen = {**constants, **config.kwargs}
        names = kernel.fn.arg_names
        assert set(names) == set(types) | set(chosen), names
        pointers = {(i,): ALIGNED for i, name in enumerate(names) if types.get(name, "").startswith("*")}
        signature = {name: types.get(name, "constexpr") for name in names}
        source = ASTSource(fn=kernel.fn, signature=signature, constexprs=chosen, attrs=pointers)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        compiled.append((kernel.fn.__name__, len(binary.asm["cubin"]), binary.metadata.shared))

for sums in ("*i32", "*i64"):
    unit = 1 << (20 if sums == "*i32" else 42)
    compile_all(distance.accumulate, {**SEARCH, "sums": sums, "positions": "*i32", "positions_of_members": "*i32",
                                      "n": "i32", "cells_before": "i64"}, UNIT=unit)
    compile_all(distance.finish, {"distances": "*fp32", "sums": sums, "lengths": "*i64", "alphas": "*fp64",
                                  "n": "i32", "first_row": "i32", "cells_before": "i64", "size": "i32"}, UNIT=unit)
    compile_all(overlap.accumulate, {**SEARCH, "sums": sums, "weights": sums, "stride": "i32", "first_row": "i32"})
    for width in (16, 1024):
        compile_all(overlap.select, {"partners": "*i32", "overlaps": "*i64", "sums": sums, "stride": "i32", "n": "i32",
                                     "first_row": "i32", "m": "i32", "bits": "i32", "size": "i32"}, WIDTH=width)
print(json.dumps(compiled))
"""


def test_kernels_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert {name for name, _, _ in compiled} == {"accumulate", "finish", "select"}
    assert len(compiled) == 2 * 5 * 6
    assert all(size > 0 and shared <= 227 * 1024 for _, size, shared in compiled)
