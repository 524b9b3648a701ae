"""A training state is written and read back whole, wherever its tensors lie in memory."""

import torch

from lowprec.data.open import open_data
from lowprec.train.build import build


def test_a_state_of_tied_weights_and_another_order_in_memory_comes_back(make_config, tmp_path):
    config = make_config({"precision.autocast": "pure_bf16"})
    first, second = (build(config, open_data(config)) for _ in range(2))
    first.task.model.to(memory_format=torch.channels_last)
    weight = first.task.model.visual.conv1.weight
    assert not weight.is_contiguous()
    for built in (first, second):  # tied weights
        visual = built.task.model.visual
        visual.ln_post.weight = visual.ln_pre.weight
    for tensors in first.state._tensors().values():
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape))
    for name, data in first.state.files().items():
        (tmp_path / name).write_bytes(data)
    second.state.load(tmp_path)
    for kind, tensors in first.state._tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(second.state._tensors()[kind][name], tensor), (kind, name)
