"""A training state is written and read back whole, wherever its tensors lie in memory."""

import torch


def test_a_state_of_tied_weights_and_another_order_in_memory_comes_back(built, tmp_path):
    first, second = (built({"precision.autocast": "pure_bf16"}) for _ in range(2))
    first.task.model.to(memory_format=torch.channels_last)
    weight = first.task.model.visual.conv1.weight
    assert not weight.is_contiguous()
    for each in (first, second):  # tied weights
        visual = each.task.model.visual
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
