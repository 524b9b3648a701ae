"""What quantization does to the tensors of a trained run, or to dot products of normal numbers.

    python -m experiments.quant_error run=RUN 'recipes=[switchback,fp8_tensorwise]'
    python -m experiments.quant_error

The first loads the run's newest checkpoint, takes one training batch forward and backward in the
run's precision, and catches input, weight and output gradient of every linear layer that recipes
apply to. A JSON line a recipe, layer, product and operand goes to RUN/quant_error.jsonl, which is
written anew; the layers whose products are worst are printed. A product that a recipe leaves in 16
bit is measured with operands in bf16, the yardstick; where those lose nothing it is not printed.

The second writes the variance of quantized dot products by their inner dimension, measured and
predicted, to `run_dir/bench/quantization_variance/<time>.jsonl`; figure: quantization_variance.
"""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.entry import run_command
from lowprec.config.check import ConfigError
from lowprec.config.preflight import preflight
from lowprec.config.schema import key
from lowprec.data.open import open_data
from lowprec.nn.recipe import PRODUCTS, RECIPES, Recipe
from lowprec.runs.environment import environment
from lowprec.runs.read import encode_row, read_config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowprec.train.build import Built

SLUG = "quantization_variance"
ROWS, COLUMNS = 128, 64  # of the products of normal numbers
CASES = {  # case: formats of the operands; the granularities are SwitchBack's
    "int8": ("int8", "int8"),
    "e4m3": ("e4m3", "e4m3"),
    "e5m2 e4m3": ("e5m2", "e4m3"),
}
GRANULARITIES = ("rowwise", "tensorwise")
TOLERANCE = 0.1  # of measured / predicted, for `correct`
WORST = 3  # layers printed of a product


@dataclass
class QuantErrorConfig:
    """Which tensors, in which formats."""

    run: str | None = key(None, "a run directory; null: normal numbers by inner dimension")
    recipes: list[str] = key(
        ["switchback", "llm_int8", "fp8_tensorwise"], "of a run's layers", choices=tuple(RECIPES)
    )
    inner_dims: list[int] = key([2**k for k in range(6, 18)], "of normal numbers", least=2)
    seed: int = key(0, "of the normal numbers", least=0)
    device: str = key("auto", "where", choices=("auto", "cpu", "cuda"))
    run_dir: str = key("runs", "the lines of normal numbers go into its bench/")


def main(config: QuantErrorConfig) -> None:
    """Measures and writes."""
    if config.run is None:
        measure_normal(config)
        return
    run = Path(config.run)
    step, layers = catch(run, config.device)
    rows = [
        {"step": step, "recipe": name, "layer": layer, **row}
        for name in config.recipes
        for layer, tensors in layers.items()
        for row in layer_rows(tensors, RECIPES[name])
    ]
    (run / "quant_error.jsonl").write_text("".join(map(encode_row, rows)))
    print("\n".join(table(rows)))


def catch(run: Path, device: str) -> "tuple[int, dict[str, dict[str, Tensor]]]":
    """Step of the newest checkpoint; x, w and g of each layer at the batch after it (or the last).

    x and g are in the dtype that the layer computes in, as 2-d tensors; w is as it is stored.
    """
    from lowprec.runs.attempts import CheckpointError
    from lowprec.train.build import build
    from lowprec.train.checkpoint import newest_checkpoint

    try:
        trained = read_config(run)
        trained.device, trained.num_workers = device, 0
        trained.compile = trained.checkpointing = False
        trained.evaluation.name = trained.logger.name = "none"
        trained.model.init_from = None
        preflight(trained)
        built = build(trained, open_data(trained))
        found = newest_checkpoint(run)
    except (ConfigError, CheckpointError) as error:
        sys.exit(f"{run} cannot be measured:\n{error}")
    if found is None:
        sys.exit(f"{run} has no checkpoint yet")
    path, manifest = found
    built.state.load(path)
    caught = attach(built)
    batch = next(built.batches_from(min(manifest["step"] + 1, trained.num_steps)))
    built.task.model.train()
    loss, _ = built.task.loss(batch.to(built.device))
    built.state.scaler.scale(loss).backward()
    return manifest["step"], caught


def attach(built: "Built") -> "dict[str, dict[str, Tensor]]":
    """Hooks into the layers of `built.layers`; the dict fills in the next forward and backward."""
    import torch

    from lowprec.nn.mlp import unfuse

    unfuse(built.task.model)  # a fused MLP calls no layer that a hook could hear
    caught: dict = {layer.name: {} for layer in built.layers}
    modules = dict(built.task.model.named_modules())
    autocast = torch.is_autocast_enabled

    def keep(name: str, weight: "Tensor", x: "Tensor", output: "Tensor") -> None:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if autocast(kind) else x.dtype
        caught[name] |= {"x": x.detach().flatten(0, -2).to(dtype), "w": weight.detach()}
        output.register_hook(lambda g: caught[name].update(g=g.flatten(0, -2)))

    for name in caught:
        if name in modules:
            modules[name].register_forward_hook(
                lambda module, args, output, name=name: keep(name, module.weight, args[0], output)
            )
        else:
            _wrap_in_proj(modules[name.removesuffix(".in_proj")], name, keep)
    return caught


def _wrap_in_proj(attention: "nn.Module", name: str, keep) -> None:
    original = attention.in_proj

    def in_proj(x: "Tensor") -> "Tensor":
        output = original(x)
        keep(name, attention.in_proj_weight, x, output)
        return output

    attention.in_proj = in_proj


def layer_rows(tensors: "dict[str, Tensor]", recipe: Recipe) -> Iterator[dict]:
    """A row for each operand of each product of a layer under a recipe, in plain numbers.

    `sqnr_db` is the operand's, `product_sqnr_db` the product's, without what its own sum and
    rounding add.
    """
    from lowprec.diagnostics.noise import inner_dim, operand_noise, product, sqnr_db
    from lowprec.formats import parse_format
    from lowprec.ops.reference import fake_quantize

    for name, operands in PRODUCTS.items():
        exact = [tensors[operand].float() for operand in operands]
        formats = getattr(recipe, name)
        used, rows = [], []
        for operand, tensor in zip(operands, exact, strict=True):
            if formats is None:
                used.append(tensor.bfloat16().float())
                row = {"format": "bf16", "granularity": None}
                rows.append(row | {"sqnr_db": sqnr_db(tensor, used[-1])})
                continue
            how = formats.first if operand == operands[0] else formats.second
            format = parse_format(how.format)
            used.append(fake_quantize(tensor, format, how.granularity, tensor.dtype))
            row = {"format": how.format, "granularity": how.granularity}
            rows.append(row | operand_noise(tensor, format, how.granularity))
        facts = {"product": name, "inner_dim": inner_dim(name, exact[0])}
        facts["product_sqnr_db"] = sqnr_db(product(name, *exact), product(name, *used))
        yield from ({**facts, "operand": o, **r} for o, r in zip(operands, rows, strict=True))


def table(rows: list[dict]) -> Iterator[str]:
    """Lines: of each recipe and product the layers whose product has the least SQNR, in dB."""
    yield f"{'recipe':22}{'product':13}{'dB':>6}   operands (dB, share lost)   layer"
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        for product in PRODUCTS:
            chosen = [r for r in rows if r["recipe"] == recipe and r["product"] == product]
            layers = {r["layer"]: r["product_sqnr_db"] for r in chosen}
            layers = {name: db for name, db in layers.items() if db != math.inf}  # not rounded
            # NaN is the worst of all, and compares with nothing
            by_sqnr = sorted(layers, key=lambda name: (not math.isnan(layers[name]), layers[name]))
            for layer in by_sqnr[:WORST]:
                parts = "  ".join(
                    f"{r['operand']} {r['sqnr_db']:.1f} {100 * r.get('underflowed', 0):.1f}%"
                    for r in chosen
                    if r["layer"] == layer
                )
                yield f"{recipe:22}{product:13}{layers[layer]:6.1f}   {parts:28}{layer}"


def measure_normal(config: QuantErrorConfig) -> None:
    """Writes and prints a line a case and inner dimension."""
    import torch

    from lowprec.diagnostics.noise import dot_error_variance
    from lowprec.formats import parse_format

    facts = environment()
    out = Path(config.run_dir) / "bench" / SLUG / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(config.seed)
    for dim in config.inner_dims:
        x = torch.randn(ROWS, dim, generator=generator)
        w = torch.randn(COLUMNS, dim, generator=generator)
        for case, names in CASES.items():
            formats = tuple(parse_format(name) for name in names)
            measured, predicted = dot_error_variance(x, w, formats, GRANULARITIES)
            ratio = measured / predicted
            row = {
                "slug": SLUG,
                "device": facts["cpu"],
                "versions": facts["packages"],
                "commit": facts["commit"],
                "case": case,
                "shape": f"{ROWS}x{dim}x{COLUMNS}",
                "dtype": "float32",
                "ms": None,
                "rate": None,
                "inner_dim": dim,
                "measured": measured,
                "predicted": predicted,
                "ratio_to": "predicted",
                "ratio": round(ratio, 4),
                "correct": abs(ratio - 1) <= TOLERANCE,
            }
            with open(out, "a") as file:
                file.write(encode_row(row))
            print(f"{case:10} {dim:7} measured {measured:.4g} predicted {predicted:.4g}")
    print(out)


if __name__ == "__main__":
    run_command(main, "quant_error", QuantErrorConfig)
