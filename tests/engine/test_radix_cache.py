"""The radix tree against SGLang's own prefix cache, to the token; its Python needs no GPU.

WARMPREFIX_SGLANG is the folder of an environment that has SGLang.
"""

from __future__ import annotations

import os

import pytest
from tests.tools.caches.radix_workloads import RECORDED, SGLANG, hits_of_sglang, random_workload, recorded_hits
from tests.tools.caches.test_radix_tree import hits_of_tree

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(SGLANG not in os.environ, reason=f"{SGLANG} must be set to an environment with SGLang"),
]


def test_hits_equal_those_of_sglangs_cache() -> None:
    workloads = [random_workload(seed) for seed in range(RECORDED, RECORDED + 200)]
    for workload, expected in zip(workloads, hits_of_sglang(workloads), strict=True):
        assert hits_of_tree(workload) == expected, workload


def test_recorded_hits_are_those_of_the_installed_version() -> None:
    assert hits_of_sglang([random_workload(seed) for seed in range(RECORDED)]) == recorded_hits()
