"""Recipes: the number format and granularity of each operand of a linear layer's three products.

    output = x W^T        grad_input = g W        grad_weight = g^T x

Granularities refer to the tensors as stored, x[M, K], W[N, K], g[M, N], even where the product
transposes them; "RxC" has one scale for each tile of R rows and C columns. A product of None runs
in the 16-bit (autocast) dtype. Native products run on 8-bit matrix units: int8, and fp8 in recipes
whose name starts with `hw_`. Other products are fake-quantized: operands are rounded to fp8 or
narrower formats, scaled back and multiplied in 16 bits.

Imports no torch, so that a config can be checked without it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lowprec.nearest import nearest

LINEAR_LAYERS = ("in_proj", "out_proj", "c_fc", "c_proj")  # low-precision in arXiv:2304.13013
ALIASES = {  # open_clip's name: what timm, transformers and gated MLPs call the layer
    "in_proj": (
        *("attn.qkv", "token_mixer.qkv", "q_proj", "k_proj", "v_proj"),
        *("attn_pool.q", "attn_pool.kv", "attn.q", "attn.k", "attn.v", "attn.kv"),
    ),
    "out_proj": ("attn.proj", "token_mixer.proj", "attn_pool.proj", "o_proj"),
    "c_fc": ("mlp.fc1", "mlp.fc1_[gx]", "mlp.w[01]", "mlp.w12", "gate_proj", "up_proj"),
    "c_proj": ("mlp.fc2", "mlp.w[23]", "down_proj"),
}
PRODUCTS = {"output": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}
SUMMED = {  # product: the dimension of each operand, as stored, that it sums over
    "output": (1, 1),
    "grad_input": (1, 0),
    "grad_weight": (0, 0),
}
GRANULARITIES = ("rowwise", "columnwise", "tensorwise")
TILES = r"[1-9]\d{0,3}x[1-9]\d{0,3}"
SCALES = ("float32", "e8m0", "e4m3")  # number formats of scales
INTEGERS = ("int8",)  # a product of integers is native
FORMATS = "|".join((*INTEGERS, "e4m3_bnb", "e5m2_bnb", r"e[1-7]m(\d|10)"))  # see `lowprec.formats`


@dataclass(frozen=True)
class Operand:
    """How one tensor of a product is quantized.

    `lowprec.formats` defines the formats, `lowprec.ops.reference.fake_quantize` the rest.
    """

    format: str
    granularity: str
    scale: str = "float32"
    stochastic: bool = False


@dataclass(frozen=True)
class Product:
    """The operands of one product, in the order of PRODUCTS.

    `native`: multiplied on 8-bit matrix units; otherwise fake-quantized. `hadamard`: both operands
    are rotated along the summed dimension first (see `lowprec.ops.reference.hadamard`).
    """

    first: Operand
    second: Operand
    native: bool
    hadamard: bool = False


@dataclass(frozen=True)
class Recipe:
    """The three products of a layer; None means 16-bit.

    `saves_int8`: saves the quantized input for backward. `function`: uses a custom autograd
    function even if all products are 16-bit.
    Raises ValueError for a native product that 8-bit matrix units cannot compute.
    """

    name: str
    output: Product | None = None
    grad_input: Product | None = None
    grad_weight: Product | None = None
    saves_int8: bool = False
    function: bool = True

    def __post_init__(self):
        for name, product in zip(PRODUCTS, self.products, strict=True):
            if product and product.native:
                _check_native(name, product)
        x = self.output.first.granularity if self.output and self.output.native else None
        if self.saves_int8 and x not in GRANULARITIES:
            raise ValueError(f"saves_int8 of {self.name}: needs a native output without tiles in x")

    @property
    def products(self) -> tuple[Product | None, ...]:
        """The three products, in the order of PRODUCTS."""
        return self.output, self.grad_input, self.grad_weight

    @property
    def native_formats(self) -> set[str]:
        """Formats of the operands of native products."""
        native = [product for product in self.products if product and product.native]
        return {operand.format for p in native for operand in (p.first, p.second)}

    @property
    def is_native(self) -> bool:
        """Whether there are products below 16 bits and all of them are native."""
        low = [product for product in self.products if product]
        return bool(low) and all(product.native for product in low)

    @property
    def shares_input(self) -> bool:
        """Whether x is quantized for output and grad_weight at once."""
        return _is_pair(self.output, self.grad_weight, "second")

    @property
    def shares_gradient(self) -> bool:
        """Whether g is quantized for grad_input and grad_weight at once."""
        return _is_pair(self.grad_input, self.grad_weight, "first")

    @property
    def shares_weight(self) -> bool:
        """Whether output and grad_input share one quantized weight, once transposed."""
        output, grad_input = self.output, self.grad_input
        if output is None or grad_input is None or not (output.native and grad_input.native):
            return False
        return output.second == grad_input.second


def _is_pair(product: Product | None, grad_weight: Product | None, position: str) -> bool:
    """Whether native products take an operand quantized alike along the dimension they sum over."""
    if product is None or grad_weight is None or not (product.native and grad_weight.native):
        return False
    one, other = product.first, getattr(grad_weight, position)
    granularities = one.granularity, other.granularity
    return one.format == other.format and granularities in ((TENSOR, TENSOR), ("1x128", "128x1"))


def _check_native(name: str, product: Product) -> None:
    """Raises ValueError for what 8-bit matrix units do not take."""
    letters, pair, dims = PRODUCTS[name], (product.first, product.second), SUMMED[name]
    tiles = [("128x1", "1x128")[dim] for dim in dims]
    allowed, in_tiles = ", ".join(GRANULARITIES), False
    if product.first.format not in INTEGERS:
        allowed += f", or {letters[0]}={tiles[0]} with {letters[1]}={tiles[1]} or 128x128"
        is_tile = pair[1].granularity in (tiles[1], "128x128")
        in_tiles = pair[0].granularity == tiles[0] and is_tile
    for letter, operand, dim in zip(letters, pair, dims, strict=True):
        granularity = operand.granularity
        what = operand.format if operand.format in INTEGERS else f"native {operand.format}"
        if granularity not in GRANULARITIES and not in_tiles:
            raise ValueError(f"{name}.{letter}={granularity}: {what} needs one of {allowed}")
        if granularity == ("rowwise", "columnwise")[dim]:
            raise ValueError(
                f"{name}.{letter}={granularity}: a scale of {what} cannot vary along the dimension "
                f"that {name} sums over"
            )
        options = {"scale": operand.scale, "stochastic": operand.stochastic}
        for option, value in (options | {"hadamard": product.hadamard}).items():
            if value not in ("float32", False):
                raise ValueError(f"{name}.{option}={value}: {what} has no such option")


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


def _tiled(
    name: str,
    format: str,
    size: int,
    scale: str = "float32",
    weight: int = 0,
    rht_sr: bool = False,
    native: bool = False,
) -> Recipe:
    """A recipe with a scale for `size` elements along the summed dimension, in all operands.

    `weight`: the weight has square tiles of that size instead, the same in both of its products.
    `rht_sr`: g is rounded stochastically, and the operands of grad_weight are rotated.
    """

    def product(name: str) -> Product:
        operands = []
        for operand, dim in zip(PRODUCTS[name], SUMMED[name], strict=True):
            tile = (f"{size}x1", f"1x{size}")[dim]
            if operand == "w" and weight:
                tile = f"{weight}x{weight}"
            operands.append(Operand(format, tile, scale, stochastic=rht_sr and operand == "g"))
        return Product(*operands, native, hadamard=rht_sr and name == "grad_weight")

    return Recipe(name, *map(product, PRODUCTS))


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
        _tiled("fp8_blockwise", "e4m3", 128, weight=128),  # arXiv:2412.19437, section 3.3
        _tiled("mxfp8", "e4m3", 32, "e8m0"),
        _tiled("mxfp4", "e2m1", 32, "e8m0"),
        _tiled("nvfp4", "e2m1", 16, "e4m3"),
        _tiled("nvfp4_rht_sr", "e2m1", 16, "e4m3", weight=16, rht_sr=True),  # arXiv:2509.25149
        _fp8("hw_fp8_tensorwise", *[(TENSOR, TENSOR)] * 3, native=True),
        _fp8("hw_fp8_switchback", (ROW, TENSOR), (ROW, TENSOR), native=True),
        _tiled("hw_fp8_blockwise", "e4m3", 128, weight=128, native=True),
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
        if recipe in ("fp32", "bf16", "fp16"):
            hint = "; high leaves the products in the precision of the model or of autocast"
        raise ValueError(f"recipe {recipe!r}: must be one of {', '.join(RECIPES)}{hint}")
    return RECIPES[recipe]


GAINS_FROM = {  # recipe: min(in, out) from which it beats 16 bits, without launch times
    "switchback": 768,
    "switchback_m": 768,
    "switchback_q": 768,
    "llm_int8": 1024,
    "hw_fp8_tensorwise": 768,
    "hw_fp8_switchback": 768,
    "hw_fp8_blockwise": 1024,
}


def gains_speed(recipe: Recipe, in_features: int, out_features: int) -> bool:
    """Whether a layer of this shape is faster than nn.Linear on Hopper; fake-quantized: never.

    Measured for dim to 4 dim and back, from dim 768, as CUDA graphs: experiments/PERFORMANCE.md.
    """
    least = GAINS_FROM.get(recipe.name)
    return least is not None and min(in_features, out_features) >= least


def matches(name: str, where: Sequence[str]) -> bool:
    """Whether a layer's name or its end matches one of the fnmatch patterns or its aliases."""
    patterns = [name for pattern in where for name in (pattern, *ALIASES.get(pattern, ()))]
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"*.{p}") for p in patterns)


def custom_recipe(products: dict) -> Recipe:
    """The recipe for `precision.recipe=custom`, from `precision.products`.

    Each product in PRODUCTS is "high" (also if left out), or its format (or one for each operand)
    and granularities: `{format: {g: e5m2, w: e4m3}, g: rowwise, w: tensorwise}`, and optionally a
    scale (or one for each operand), the operands that are rounded stochastically and whether both
    are rotated: `{..., scale: e8m0, stochastic: [g], hadamard: true}`. int8 products are native and
    eXmY products fake-quantized.
    Raises ValueError for an unknown key or value, and for an int8 scale that varies along the
    summed dimension.
    """
    if not isinstance(products, dict) or set(products) - set(PRODUCTS):
        raise ValueError(f"products {products}: the keys must be among {', '.join(PRODUCTS)}")
    parsed = {name: _custom_product(name, products.get(name, "high")) for name in PRODUCTS}
    return Recipe("custom", **parsed)


def _custom_product(name: str, spec: dict | str) -> Product | None:
    if spec == "high":
        return None
    operands = PRODUCTS[name]
    options = {"scale": "float32", "stochastic": [], "hadamard": False}
    required = {"format", *operands}
    if not isinstance(spec, dict) or not required <= set(spec) <= required | set(options):
        raise ValueError(
            f"{name}={spec}: must be high, or have format, {' and '.join(operands)}, "
            f"and optionally {', '.join(options)}"
        )
    spec = options | spec
    formats, scales = (_by_operand(name, key, spec[key]) for key in ("format", "scale"))
    stochastic, hadamard = spec["stochastic"], spec["hadamard"]
    if not isinstance(stochastic, list) or not all(name in operands for name in stochastic):
        raise ValueError(f"{name}.stochastic={stochastic}: must be a list of {', '.join(operands)}")
    if any(str(formats[operand]).endswith("_bnb") for operand in stochastic):
        raise ValueError(f"{name}.stochastic={stochastic}: code books are rounded to nearest only")
    if not isinstance(hadamard, bool):
        raise ValueError(f"{name}.hadamard={hadamard}: must be true or false")
    for operand in operands:
        _check_operand(name, operand, formats[operand], spec[operand], scales[operand])
    integers = [format for format in formats.values() if format in INTEGERS]
    native = len(integers) == len(formats)
    if integers and not native:
        allowed = ", ".join(INTEGERS)
        raise ValueError(f"{name}.format={formats}: {integers[0]} multiplies only {allowed}")
    parsed = (Operand(formats[o], spec[o], scales[o], o in stochastic) for o in operands)
    return Product(*parsed, native=native, hadamard=hadamard)


def _by_operand(name: str, key: str, value: dict | str) -> dict:
    """A value for each operand: they may share one."""
    operands = PRODUCTS[name]
    values = value if isinstance(value, dict) else dict.fromkeys(operands, value)
    if set(values) != set(operands):
        raise ValueError(f"{name}.{key}={value}: must name a {key} for {', '.join(operands)}")
    return values


def _check_operand(name: str, operand: str, format: str, granularity: str, scale: str) -> None:
    if not re.fullmatch(FORMATS, str(format)):
        raise ValueError(f"{name}.format={format}: must be int8, eXmY, e4m3_bnb or e5m2_bnb")
    allowed = (*GRANULARITIES, "blocks")
    if granularity not in allowed and not re.fullmatch(TILES, str(granularity)):
        raise ValueError(
            f"{name}.{operand}={granularity}: must be one of {', '.join(allowed)}, or RxC"
        )
    if scale not in SCALES:
        raise ValueError(f"{name}.scale={scale}: must be one of {', '.join(SCALES)}")
