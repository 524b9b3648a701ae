"""Statistics and clipping of sharded parameters are those of the whole tensors, also if watched."""

import pytest
import torch


@pytest.mark.parametrize(
    ("size", "width"), [(2, 13), pytest.param(4, 12, marks=pytest.mark.slow)]
)  # 13 rows in two uneven parts; tensor parallelism needs even ones
def test_several_processes_take_the_steps_of_one(ranks, size, width):
    loaded = []
    for count in (1, size):
        answer = ranks("sharded_steps", count, width=width)
        loaded += [torch.load(answer["folder"] / f"{rank}.pt") for rank in range(count)]
    (expected, expected_params, _), *of_ranks = loaded
    assert expected[2, :, 0].max() > 1.3  # it was clipped
    for statistics, params, refused in of_ranks:
        torch.testing.assert_close(statistics, expected, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(params, expected_params, rtol=1e-5, atol=1e-7)
        if size == 2:
            assert "(head) is placed as (Shard(dim=0),), its gradient as (Replicate()" in refused[0]
            assert "(head) is placed as Partial(sum)" in refused[1]


def test_several_processes_record_and_find_what_one_does(ranks):
    loaded = []
    for count, kind in ((1, "ddp"), (2, "ddp"), (2, "fsdp2")):
        answer = ranks("watched", count, kind=kind)
        files = [answer["folder"] / f"{rank}.pt" for rank in range(count)]
        loaded += [torch.load(file, weights_only=False) for file in files]
    (names, expected, spikes), *of_ranks = loaded
    assert names == ["0.weight", "0.bias", "2.weight"]
    assert {(s.step, s.tensor) for s in spikes} >= {(40, 0), (43, None)}
    for one, other in (of_ranks[:2], of_ranks[2:]):
        assert one == other  # to the bit
    for own_names, rows, own_spikes in of_ranks:
        assert own_names == names and len(rows) == 60
        assert [spike[:2] for spike in own_spikes] == [spike[:2] for spike in spikes]
        for row, of_one in zip(rows, expected, strict=True):
            assert row == pytest.approx(of_one, rel=2e-3, abs=1e-6)
