"""Measures quantization errors in a trained run's layers, or in dot products of random numbers.

    python -m experiments.quant_error run=RUN 'recipes=[switchback,fp8_tensorwise]'
    python -m experiments.quant_error

The first command loads the run's newest checkpoint, runs one training batch forward and backward in
the run's precision, and captures the input, weight and output gradient of each linear layer that
recipes apply to. It overwrites RUN/quant_error.jsonl with a line per recipe, layer, product and
operand, and prints the layers with the worst products. Products that a recipe leaves in 16 bits are
measured with bf16 operands for comparison, and not printed if bf16 rounds nothing.

`checkpoints=[0,500]` measures the initial weights and step 500 instead, `layers=[*resblocks.0.*]`
only the matching layers, `batch_size=256` a smaller batch, and `num_tokens=[1024,4096]` only the
first tokens of the batch: they are the terms of a weight gradient's sums.

The second command writes the measured and predicted error variance of quantized dot products by
inner dimension to `run_dir/bench/quantization_variance/<time>.jsonl`; figure:
quantization_variance.
"""

import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.entry import run_command
from lowprec.config.schema import key
from lowprec.nn.recipe import RECIPES
from lowprec.runs.read import encode_row
from lowprec.waiting import Waiting

WORST = 3  # layers to print per product


@dataclass
class QuantErrorConfig:
    """What to measure, and in which formats."""

    run: str | None = key(None, "a run directory; null for random numbers by inner dimension")
    recipes: list[str] = key(
        ["switchback", "llm_int8", "fp8_tensorwise"], "recipes for a run", choices=tuple(RECIPES)
    )
    checkpoints: list[int] = key([], "their steps; 0: initial weights; []: the newest", least=0)
    layers: list[str] = key(["*"], "patterns for the names of a run's layers")
    batch_size: int | None = key(None, "image-text pairs; null: the run's", least=2)
    num_tokens: list[int] = key([], "tokens of the batch to use; []: all", least=1)
    inner_dims: list[int] = key([2**k for k in range(6, 18)], "sizes of random vectors", least=2)
    seed: int = key(0, "seed of the random numbers", least=0)
    device: str = key("auto", "device for a run", choices=("auto", "cpu", "cuda"))
    run_dir: str = key("runs", "results for random numbers go to its bench/")


def main(config: QuantErrorConfig) -> None:
    """Measures, writes and prints."""
    from experiments.quant_noise import capture, measure_random  # load torch
    from lowprec.nn.noise import layer_rows

    if config.run is None:
        measure_random(config.inner_dims, config.seed, config.run_dir)
        return
    run, rows = Path(config.run), []
    for checkpoint in config.checkpoints or [None]:
        step, layers = capture(
            run,
            config.device,
            checkpoint=checkpoint,
            layers=config.layers,
            batch_size=config.batch_size,
        )
        rows += [
            {"step": step, "recipe": name, "layer": layer, **row}
            for name in config.recipes
            for layer, tensors in layers.items()
            for num_tokens in config.num_tokens or [None]
            for row in layer_rows(
                {k: x if k == "w" else x[:num_tokens] for k, x in tensors.items()}, RECIPES[name]
            )
        ]
    (run / "quant_error.jsonl").write_text("".join(map(encode_row, rows)))
    print(worst_layers(rows).to_string(index=False, float_format="{:.1f}".format))


def worst_layers(rows: list[dict]) -> pd.DataFrame:
    """The layers with the lowest SQNR, in dB, for each recipe and product; NaN is the worst."""
    columns = ["recipe", "product", "product_sqnr_db", "layer"]
    layers = pd.DataFrame(rows)[columns].drop_duplicates()
    layers = layers[layers["product_sqnr_db"] != math.inf]  # bf16 rounds nothing
    layers = layers.sort_values(columns, na_position="first")
    return layers.groupby(["recipe", "product"]).head(WORST)


if __name__ == "__main__":
    with closing(Waiting("measuring")):
        run_command(main, "quant_error", QuantErrorConfig)
