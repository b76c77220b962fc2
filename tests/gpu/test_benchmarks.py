"""The GPU benchmark on a CUDA device, with tiny models: every contender that is installed runs, peaks and waits are
counted.

pytest tests/gpu/test_benchmarks.py        # about 3 minutes on one card
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")


@pytest.mark.timeout(1800)
def test_every_path_on_the_card(monkeypatch):
    pytest.importorskip("trl", reason="trl is not installed")
    from benchmarks.gpu import gpu, gpu_table

    seen = []
    monkeypatch.setattr(gpu_table, "show", lambda results, peak: seen.extend(results))
    assert gpu.run(gpu.options(["--quick", "--device", "cuda"])) == 0
    good = gpu_table.measured(seen)
    assert {one["tuning"] for one in good} == {"lora", "qlora", "full"}
    assert {"stock", "ours", "trl"} <= {one["contender"] for one in good}
    assert all(one["reserved_bytes"] >= one["peak_bytes"] > 0 and one["host_syncs"] > 0 for one in good)
