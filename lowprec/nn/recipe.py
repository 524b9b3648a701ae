"""Recipes: the number format and granularity of each operand of a linear layer's three products.

    output = x W^T        grad_input = g W        grad_weight = g^T x

Granularities refer to the tensors as stored, x[M, K], W[N, K], g[M, N], even where the product
transposes them. A product of None runs in the 16-bit (autocast) dtype. Native products run on
8-bit matrix units: int8, and fp8 in recipes whose name starts with `hw_`. Other fp8 products are
fake-quantized: operands are rounded to fp8 values, scaled back and multiplied in 16 bits.

Imports no torch, so that a config can be checked without it.
"""

import re
from dataclasses import dataclass

from lowprec.nearest import nearest

LINEAR_LAYERS = ("in_proj", "out_proj", "c_fc", "c_proj")  # low-precision in arXiv:2304.13013
PRODUCTS = {"output": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}
CONTRACTED = {  # product: the granularity of each operand that varies along the summed dimension
    "output": {"x": "columnwise", "w": "columnwise"},
    "grad_input": {"g": "columnwise", "w": "rowwise"},
    "grad_weight": {"g": "rowwise", "x": "rowwise"},
}
GRANULARITIES = ("rowwise", "columnwise", "tensorwise")
FORMATS = r"int8|e4m3_bnb|e5m2_bnb|e[1-7]m(\d|10)"  # the names that `lowprec.formats` parses


@dataclass(frozen=True)
class Operand:
    """How one tensor of a product is quantized; `lowprec.formats` defines the formats."""

    format: str
    granularity: str


@dataclass(frozen=True)
class Product:
    """The operands of one product, in the order of PRODUCTS.

    `native`: multiplied on 8-bit matrix units; otherwise fake-quantized.
    """

    first: Operand
    second: Operand
    native: bool


@dataclass(frozen=True)
class Recipe:
    """The three products of a layer; None means 16-bit.

    `saves_int8`: saves the quantized input for backward. `function`: uses a custom autograd
    function even if all products are 16-bit.
    """

    name: str
    output: Product | None = None
    grad_input: Product | None = None
    grad_weight: Product | None = None
    saves_int8: bool = False
    function: bool = True

    @property
    def products(self) -> tuple[Product | None, ...]:
        """The three products, in the order of PRODUCTS."""
        return self.output, self.grad_input, self.grad_weight

    @property
    def shares_weight(self) -> bool:
        """Whether output and grad_input share one quantized weight, once transposed."""
        output, grad_input = self.output, self.grad_input
        if output is None or grad_input is None or not (output.native and grad_input.native):
            return False
        return output.second == grad_input.second and output.second.granularity == "tensorwise"


def _int8(first: str, second: str) -> Product:
    return Product(Operand("int8", first), Operand("int8", second), native=True)


def _fp8(name: str, output, grad_input, grad_weight=None, native: bool = False) -> Recipe:
    """A recipe with e4m3 inputs and weights and e5m2 gradients, from pairs of granularities."""

    def product(first_format: str, granularities: tuple[str, str] | None) -> Product | None:
        if granularities is None:
            return None
        first, second = granularities
        return Product(Operand(first_format, first), Operand("e4m3", second), native)

    backward = (product("e5m2", pair) for pair in (grad_input, grad_weight))
    return Recipe(name, product("e4m3", output), *backward)


ROW, COLUMN, TENSOR = GRANULARITIES
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("high", function=False),
        Recipe("autograd_high"),  # algorithm 5: the baseline for speed
        Recipe("switchback", _int8(ROW, TENSOR), _int8(ROW, TENSOR)),  # algorithm 1
        Recipe("switchback_m", _int8(ROW, TENSOR), _int8(ROW, TENSOR), saves_int8=True),
        Recipe("switchback_q", _int8(ROW, ROW), _int8(ROW, COLUMN)),
        Recipe("llm_int8", _int8(ROW, ROW), _int8(ROW, COLUMN), _int8(COLUMN, COLUMN)),
        _fp8("fp8_tensorwise", (TENSOR, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR)),
        _fp8("fp8_rowwise", (ROW, ROW), (ROW, COLUMN), (COLUMN, COLUMN)),
        _fp8("fp8_switchback", (ROW, TENSOR), (ROW, TENSOR)),
        _fp8("fp8_switchback_blocks", ("blocks", TENSOR), ("blocks", TENSOR)),
        _fp8("hw_fp8_tensorwise", *[(TENSOR, TENSOR)] * 3, native=True),
        _fp8("hw_fp8_switchback", (ROW, TENSOR), (ROW, TENSOR), native=True),
    )
}


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe with a name in RECIPES; a Recipe is returned as it is.

    Raises ValueError with the known names for any other name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        hint = nearest(str(recipe), RECIPES)
        raise ValueError(f"recipe {recipe!r}: must be one of {', '.join(RECIPES)}{hint}")
    return RECIPES[recipe]


def custom_recipe(products: dict) -> Recipe:
    """The recipe for `precision.recipe=custom`, from `precision.products`.

    Each product in PRODUCTS is "high" (also if left out), or its format (or one for each operand)
    and granularities: `{format: {g: e5m2, w: e4m3}, g: rowwise, w: tensorwise}`. int8 products are
    native and eXmY products fake-quantized.
    Raises ValueError for an unknown key, format or granularity, and for an int8 scale that varies
    along the contracted dimension.
    """
    if not isinstance(products, dict) or set(products) - set(PRODUCTS):
        raise ValueError(f"products {products}: the keys must be among {', '.join(PRODUCTS)}")
    parsed = {name: _custom_product(name, products.get(name, "high")) for name in PRODUCTS}
    return Recipe("custom", **parsed)


def _custom_product(name: str, spec: dict | str) -> Product | None:
    if spec == "high":
        return None
    operands = PRODUCTS[name]
    if not isinstance(spec, dict) or set(spec) != {"format", *operands}:
        raise ValueError(f"{name}={spec}: must be high, or have format, {' and '.join(operands)}")
    formats = spec["format"]
    if not isinstance(formats, dict):
        formats = dict.fromkeys(operands, formats)
    if set(formats) != set(operands):
        raise ValueError(f"{name}.format={formats}: must name a format for {', '.join(operands)}")
    for operand in operands:
        if not re.fullmatch(FORMATS, str(formats[operand])):
            raise ValueError(
                f"{name}.format={formats[operand]}: must be int8, eXmY, e4m3_bnb or e5m2_bnb"
            )
        if spec[operand] not in GRANULARITIES:
            allowed = ", ".join(GRANULARITIES)
            raise ValueError(f"{name}.{operand}={spec[operand]}: must be one of {allowed}")
    native = set(formats.values()) == {"int8"}
    if "int8" in formats.values() and not native:
        raise ValueError(f"{name}.format={formats}: int8 multiplies only int8")
    for operand, granularity in CONTRACTED[name].items():
        if native and spec[operand] == granularity:
            raise ValueError(
                f"{name}.{operand}={granularity}: an int8 scale cannot vary along the dimension "
                f"that {name} sums over"
            )
    return Product(*(Operand(formats[name], spec[name]) for name in operands), native=native)
