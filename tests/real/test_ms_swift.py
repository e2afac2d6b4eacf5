"""ms-swift: its pipeline of fine-tuning with its FSDP2 preset, through accelerate."""

import pytest
from environments import same_as_stock


@pytest.mark.parametrize("what", ["full", "lora"])
def test_sft(tmp_path, what):
    same_as_stock("ms_swift", "ms_swift_sft", tmp_path, what)
