"""Loss and gradients do not depend on how many processes, or parts, compute them."""

import functools

import pytest
import torch

INT8 = {"precision.recipe": "switchback", "precision.backend": "reference"}
LOCKED = {"optimizer.lr_scale": {"image": 0, "visual.proj": 1}}
CASES = {
    "plain": {},
    "dropout": {"model.patch_dropout": 0.5},
    "parts": {"accumulate": 2},
    "parts dropout": {"accumulate": 4, "model.patch_dropout": 0.5},
    "parts scaled": {"accumulate": 2},
    "checkpointing": {"checkpointing": True},
    "fsdp2": {},
    "fsdp2 parts dropout": {"accumulate": 2, "model.patch_dropout": 0.5},
    "fsdp2 checkpointing": {"checkpointing": True, "accumulate": 2},
    "int8": INT8,
    "fsdp2 int8": INT8,
    "locked": LOCKED,
    "locked parts": {**LOCKED, "accumulate": 2, "checkpointing": True},
    "fsdp2 locked": LOCKED,
    "fsdp2 locked parts": {"optimizer.lr_scale": {"image": 0, "logit_scale": 0}, "accumulate": 2},
}  # fmt: skip
REFERENCE = {  # case: the one whose gradients, of one process and in one piece, it must give
    "plain": "plain", "dropout": "dropout", "parts": "plain", "parts dropout": "dropout",
    "parts scaled": "plain", "checkpointing": "plain",
    "locked": "locked", "locked parts": "locked", "fsdp2 locked": "locked",
    "fsdp2 locked parts": "fsdp2 locked parts",
    "fsdp2": "plain", "fsdp2 parts dropout": "dropout", "int8": "int8", "fsdp2 int8": "int8",
    "fsdp2 checkpointing": "plain",
}  # fmt: skip
TRIALS = [(name, size) for name in CASES for size in (1, 2)]
TRIALS += [(name, 4) for name in ("dropout", "fsdp2 parts dropout")]


@pytest.fixture(scope="module")
def saved(ranks, make, once):
    """By case and number of ranks: what the first of them found, and the others the same."""
    folder, results = once("gradients", functools.partial(compute_all, ranks, make)), {}
    for name, size in TRIALS:
        files = [folder / str(size) / f"{name}.{rank}.pt" for rank in range(size)]
        results[name, size], *others = map(torch.load, files)
        for other in others:
            for key, value in results[name, size].items():
                assert torch.equal(value, other[key]), (name, key)
    return results


def compute_all(ranks, make, folder):
    for size in (1, 2, 4):
        configs = {}
        for name, changes in CASES.items():
            if (name, size) not in TRIALS:
                continue
            kind = {"distributed.name": "fsdp2" if name.startswith("fsdp2") else "ddp"}
            configs[name] = make({"model.vision_layers": 2, **changes, **kind})
        ranks("gradients", size, folder=folder / str(size), configs=configs)


@pytest.mark.parametrize(("name", "size"), TRIALS)
def test_loss_and_gradients_are_those_of_one_process_with_the_whole_batch(saved, name, size):
    expected, result = saved[REFERENCE[name], 1], saved[name, size]
    for key in expected.keys() - {"groups"}:
        value = expected[key]
        largest = max(float(value.abs().max()), 1e-3)
        torch.testing.assert_close(result[key], value, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize(("name", "size"), [t for t in TRIALS if "fsdp2" in t[0] and t[1] > 1])
def test_fsdp2_gathers_all_parameters_but_those_of_the_root_once_per_step(saved, name, size):
    groups, gathered_once, num_whole = saved[name, size]["groups"].tolist()
    assert groups == 5 and gathered_once == groups - 1
    assert num_whole == 1  # the logit scale, which is not sharded
