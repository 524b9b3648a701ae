"""What may announce a loss spike, measured before a step: curvature and kurtosis."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec.clip import model as clip
from lowprec.config.check import RunError
from lowprec.config.schema import Config
from lowprec.data.loader import Batch
from lowprec.data.open import Data
from lowprec.optim.adamw_update import debiased
from lowprec.runs.identity import directory
from lowprec.runs.read import encode_row, scan_rows
from lowprec.train.build import Built, build
from lowprec.train.distributed import Ranks
from lowprec.train.loop import scheduled_rate
from lowprec.train.source_digests import sources_of
from lowprec.train.task import ContrastiveTask

MEASURED, EVERY = "predictors.jsonl", 2  # steps
PATCH_EMBEDDING = "visual.conv1.weight"


def build_measured(config: Config, data: Data, world: Ranks) -> Built:
    """Builds the objects of a run that is measured before every second step.

    The rows are appended to predictors.jsonl. Measuring does not change the run: it reads weights,
    moments and the batch, and restores the random state. RunError if a run is resumed that was not
    measured so far.
    """
    built = build(config, data, world)
    run = directory(config, sources_of(config, data))
    plain, batches_from = plain_task(built), built.batches_from

    def measured_batches_from(first: int) -> Iterator[Batch]:
        refuse_unmeasured(run, first - 1)
        for step, batch in enumerate(batches_from(first), first):
            if step % EVERY == 0:
                row = {"step": step, **measure(built, plain, step, batch)}
                with open(run / MEASURED, "a") as file:
                    file.write(encode_row(row))
            yield batch

    built.batches_from = measured_batches_from
    return built


def refuse_unmeasured(run: Path, last: int) -> None:
    """Raises RunError if a step of a run up to `last` was due and has not been measured."""
    due, rows = range(EVERY, last + 1, EVERY), scan_rows(run / MEASURED, {"step": int})[0]
    if missing := sorted({*due} - {row.get("step") for row in rows}):
        raise RunError(
            f"{run}: {len(missing)} of {len(due)} rows are missing in {MEASURED}, which "
            f"`experiments.train` does not write, the first of step {missing[0]}; with "
            "run_dir=FOLDER, the run is trained and measured from its start in another folder"
        )


def plain_task(built: Built) -> ContrastiveTask:
    """A run's task with a model that shares the weights and has second derivatives.

    Its attention is open_clip's, and it is not compiled.
    """
    config, task = built.config, built.task
    with torch.random.fork_rng(_devices(built)):
        plain = clip.build_model(config.model, config.intervention.name).to(built.device).train()
    plain.load_state_dict(task.model.state_dict(), assign=True)
    return ContrastiveTask(plain, task.loss_fn, task.normalize, task.autocast_name)


def measure(built: Built, plain: ContrastiveTask, step: int, batch: Batch) -> dict[str, float]:
    """Scores of a step that will be taken from these weights with this batch.

    `loss`: the step's, with the patches that it will drop; `curvature`: see `curvature`;
    `gradient_kurtosis`: of the patch embedding; `activation_kurtosis/<block>`: of each block's
    output; `measure_ms`: the time until these were there, with that of steps still queued.
    """
    start, activations = time.perf_counter(), {}
    params, blocks = dict(plain.model.named_parameters()), clip.blocks(plain.model)

    def keep(name: str, block: nn.Module, inputs: tuple, output: Tensor) -> None:
        activations[f"activation_kurtosis/{name}"] = kurtosis(output)

    named = [(name, module) for name, module in plain.model.named_modules() if module in blocks]
    handles = [block.register_forward_hook(partial(keep, name)) for name, block in named]
    try:
        with torch.random.fork_rng(_devices(built)), sdpa_kernel(SDPBackend.MATH):
            loss, _ = plain.loss(batch.to(built.device))
            gradient, product = hessian_product(loss, params)
    finally:
        for handle in handles:
            handle.remove()
    values = {"loss": loss.detach(), "curvature": curvature(built, step, gradient, product)}
    values |= {"gradient_kurtosis": kurtosis(gradient[PATCH_EMBEDDING]), **activations}
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    elapsed_ms = 1000 * (time.perf_counter() - start)
    return dict(zip(values, numbers, strict=True)) | {"measure_ms": elapsed_ms}


def _devices(built: Built) -> list[torch.device]:
    """The devices besides the CPU whose random state a run uses."""
    return [built.device] if built.device.type == "cuda" else []


def hessian_product(loss: Tensor, params: dict[str, Tensor]) -> tuple[dict, dict]:
    """The gradient g of a 0-d loss, and H g for the Hessian H, by parameter."""
    tensors = list(params.values())
    graph = torch.autograd.grad(loss, tensors, create_graph=True)
    gradient = [x.detach() for x in graph]
    product = torch.autograd.grad(graph, tensors, gradient)
    return dict(zip(params, gradient, strict=True)), dict(zip(params, product, strict=True))


def curvature(
    built: Built, step: int, gradient: dict[str, Tensor], product: dict[str, Tensor]
) -> Tensor:
    """Curvature along the gradient g of the Hessian that AdamW preconditions, times lr / 2: 0-d.

    With `product` = H g and the debiased second moment u, which includes g already, it is

        lr / 2 (1 - beta1) / (1 + beta1) / (1 - beta1^t) g^T (H g / (sqrt(u) + eps)) / g^T g

    arXiv:2506.04805 expects a loss spike where the curvature stays above 2 / lr: here, above 1.
    """
    rule = built.config.optimizer
    moments, beta2 = built.state.optimizer.tensors()["exp_avg_sq"], debiased(rule.beta2, step)
    along, squares = 0.0, 0.0
    for name, g in gradient.items():
        u = beta2 * moments[name].to(g.device) + (1 - beta2) * g.square()
        along += (g * product[name] / (u.sqrt() + rule.eps)).sum(dtype=torch.float64)
        squares += g.square().sum(dtype=torch.float64)
    lr = scheduled_rate(built.config, step)
    momentum = (1 - rule.beta1) / (1 + rule.beta1) / (1 - rule.beta1**step)
    return lr / 2 * momentum * along / squares


@torch.no_grad()
def kurtosis(x: Tensor) -> Tensor:
    """Excess kurtosis of all elements, E[(x - mean)^4] / variance^2 - 3: 0-d, 0 for a Gaussian."""
    x = x.float() - x.float().mean()
    return (x / x.square().mean().sqrt()).square().square().mean() - 3
