"""Recipes: the number format and granularity of each operand of a linear layer's three products.

    output = x W^T        grad_input = g W        grad_weight = g^T x

Granularity words name the stored tensors x[M, K], W[N, K], g[M, N], whatever the transposition in
the product. A product that is None is computed in the 16-bit (autocast) dtype. int8 products, and
fp8 ones under `hardware`, run on the matrix units of 8-bit numbers. Other fp8 products are
simulated: operands are rounded to exact fp8 values, scaled back, and multiplied in 16 bit.

Data alone: imports no torch, so that a config can be checked against it.
"""

import re
from dataclasses import dataclass

PRODUCTS = {"output": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}
CONTRACTED = {  # product: the granularity of each operand whose scale varies where it is summed
    "output": {"x": "columnwise", "w": "columnwise"},
    "grad_input": {"g": "columnwise", "w": "rowwise"},
    "grad_weight": {"g": "rowwise", "x": "rowwise"},
}
GRANULARITIES = ("rowwise", "columnwise", "tensorwise")
FORMATS = r"int8|e[1-7]m(\d|10)"  # the names that `lowprec.formats` knows


@dataclass(frozen=True)
class Operand:
    """How one tensor of a product is quantized; `lowprec.formats` knows the formats."""

    format: str
    granularity: str


@dataclass(frozen=True)
class Product:
    """The operands of one product, in the order of PRODUCTS; `real`: on 8-bit matrix units."""

    first: Operand
    second: Operand
    real: bool


@dataclass(frozen=True)
class Recipe:
    """The three products of a layer; None: 16 bit.

    `saves_int8`: backward keeps the quantized input and weight instead of the input. `function`:
    a custom autograd function even where every product is 16 bit.
    """

    name: str
    output: Product | None = None
    grad_input: Product | None = None
    grad_weight: Product | None = None
    saves_int8: bool = False
    function: bool = True

    @property
    def is_real(self) -> bool:
        """Whether every 8-bit product runs on 8-bit matrix units."""
        products = (self.output, self.grad_input, self.grad_weight)
        return all(product is None or product.real for product in products)


def _int8(first: str, second: str) -> Product:
    return Product(Operand("int8", first), Operand("int8", second), real=True)


def _forward_fp8(x: str, w: str, real: bool = False) -> Product:
    return Product(Operand("e4m3", x), Operand("e4m3", w), real)


def _backward_fp8(g: str, other: str, real: bool = False) -> Product:
    return Product(Operand("e5m2", g), Operand("e4m3", other), real)


ROW, COLUMN, TENSOR = GRANULARITIES
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("high", function=False),
        Recipe("autograd_high"),  # algorithm 5: the fair baseline of speed
        Recipe("switchback", _int8(ROW, TENSOR), _int8(ROW, TENSOR)),  # algorithm 1
        Recipe("switchback_m", _int8(ROW, TENSOR), _int8(ROW, TENSOR), saves_int8=True),
        Recipe("switchback_q", _int8(ROW, ROW), _int8(ROW, COLUMN)),
        Recipe("llm_int8", _int8(ROW, ROW), _int8(ROW, COLUMN), _int8(COLUMN, COLUMN)),
        Recipe(
            "fp8_tensorwise",
            _forward_fp8(TENSOR, TENSOR),
            _backward_fp8(TENSOR, TENSOR),
            _backward_fp8(TENSOR, TENSOR),
        ),
        Recipe(
            "fp8_rowwise",
            _forward_fp8(ROW, ROW),
            _backward_fp8(ROW, COLUMN),
            _backward_fp8(COLUMN, COLUMN),
        ),
        Recipe("fp8_switchback", _forward_fp8(ROW, TENSOR), _backward_fp8(ROW, TENSOR)),
        Recipe(
            "fp8_switchback_blocks", _forward_fp8("blocks", TENSOR), _backward_fp8("blocks", TENSOR)
        ),
        Recipe(
            "hw_fp8_tensorwise",
            _forward_fp8(TENSOR, TENSOR, real=True),
            _backward_fp8(TENSOR, TENSOR, real=True),
            _backward_fp8(TENSOR, TENSOR, real=True),
        ),
        Recipe(
            "hw_fp8_switchback",
            _forward_fp8(ROW, TENSOR, real=True),
            _backward_fp8(ROW, TENSOR, real=True),
        ),
    )
}


def custom_recipe(products: dict) -> Recipe:
    """The recipe of `precision.recipe=custom`, from `precision.products`.

    Of each product in PRODUCTS "high", or its format and the granularity of each operand:
    `{format: int8, x: rowwise, w: tensorwise}`. int8 multiplies in int8; eXmY is simulated, and
    `format` may then be one name for each operand: `{format: {g: e5m2, w: e4m3}, g: rowwise, ...}`.
    Raises ValueError for another key, format or granularity, and for an int8 scale that varies
    along the contracted dimension.
    """
    if not isinstance(products, dict) or set(products) - set(PRODUCTS):
        raise ValueError(f"products {products}: {', '.join(PRODUCTS)} are expected")
    parsed = {name: _custom_product(name, products.get(name, "high")) for name in PRODUCTS}
    return Recipe("custom", **parsed)


def _custom_product(name: str, given: dict | str) -> Product | None:
    if given == "high":
        return None
    operands = PRODUCTS[name]
    if not isinstance(given, dict) or set(given) != {"format", *operands}:
        raise ValueError(f"{name}={given}: high, or format, {' and '.join(operands)} are expected")
    formats = given["format"]
    formats = formats if isinstance(formats, dict) else dict.fromkeys(operands, formats)
    if set(formats) != set(operands):
        raise ValueError(f"{name}.format={formats}: a name for each of {', '.join(operands)}")
    for operand in operands:
        if not re.fullmatch(FORMATS, str(formats[operand])):
            raise ValueError(f"{name}.format={formats[operand]}: int8, e4m3, e5m2 or another eXmY")
        if given[operand] not in GRANULARITIES:
            known = ", ".join(GRANULARITIES)
            raise ValueError(f"{name}.{operand}={given[operand]}: {known} are expected")
    real = set(formats.values()) == {"int8"}
    if "int8" in formats.values() and not real:
        raise ValueError(f"{name}.format={formats}: int8 multiplies only int8")
    for operand, granularity in CONTRACTED[name].items():
        if real and given[operand] == granularity:
            raise ValueError(
                f"{name}.{operand}={granularity}: an int8 scale cannot vary along the dimension "
                f"that {name} sums over"
            )
    return Product(*(Operand(formats[name], given[name]) for name in operands), real=real)
