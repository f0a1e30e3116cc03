"""Skip what an old PyTorch cannot do; docs/versions.md has the list."""

import pytest
import torch
from packaging.version import Version

traces_whole_losses = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.11"), reason="torch.compile of 2.10 needs breaks in the graph of this loss"
)
gathers_strided_shards = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="torch 2.11 gathers no gradient that a plan shards in strides"
)
shards_integers = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"),
    reason="fully_shard of 2.10 makes parameters of integers need gradients",
)
traces_fake_tensors = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.11"), reason="torch.compile of 2.10 takes no fake tensors of another mode"
)
