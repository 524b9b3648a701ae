"""The table of recipes, and custom recipes from a config."""

import dataclasses

import pytest

from lowprec.nn.recipe import PRODUCTS, RECIPES, Operand, Product, Recipe, custom_recipe

CONTRACTED = {  # granularities that vary along the summed dimension
    "output": {"x": "columnwise", "w": "columnwise"},
    "grad_input": {"g": "columnwise", "w": "rowwise"},
    "grad_weight": {"g": "rowwise", "x": "rowwise"},
}
WORDS = {"rowwise": "row", "columnwise": "column", "tensorwise": "tensor", "blocks": "blocks"}
INT8 = {"format": "int8", "x": "rowwise", "w": "tensorwise"}
E2M1 = {"format": "e2m1", "x": "1x32", "w": "1x32"}


def written(product):
    """A product in the notation of the oracle's table."""
    if product is None:
        return None
    return tuple(
        f"{o.format} {WORDS.get(o.granularity, o.granularity)}"
        + f" {o.scale}" * (o.scale != "float32")
        + " stochastic" * o.stochastic
        + " rotated" * product.hadamard
        for o in (product.first, product.second)
    )


def test_recipes_match_the_oracles_table(oracle):
    table = {name: tuple(written(getattr(r, p)) for p in PRODUCTS) for name, r in RECIPES.items()}
    assert table == oracle.TABLE


def test_int8_and_hw_fp8_are_native():
    for name, recipe in RECIPES.items():
        products = [product for product in recipe.products if product]
        is_fake = name.startswith(("fp8", "mxfp", "nvfp"))
        assert all(product.native != is_fake for product in products)
        assert recipe.saves_int8 == (name == "switchback_m")
        assert recipe.function == (name != "high")


def test_custom_recipe_parses_products():
    grad_input = {"format": "int8", "g": "rowwise", "w": "tensorwise"}
    recipe = custom_recipe({"output": INT8, "grad_input": grad_input})
    assert recipe == dataclasses.replace(RECIPES["switchback"], name="custom")
    assert custom_recipe({}) == custom_recipe(dict.fromkeys(PRODUCTS, "high"))
    formats = {"format": {"g": "e5m2", "w": "e4m3"}, "g": "rowwise", "w": "columnwise"}
    e5m2, e4m3 = Operand("e5m2", "rowwise"), Operand("e4m3", "columnwise")
    recipe = custom_recipe({"grad_input": formats, "grad_weight": "high"})
    assert recipe.grad_input == Product(e5m2, e4m3, native=False) and recipe.grad_weight is None


def test_custom_recipe_can_be_the_named_block_scaled_one():
    products = {}
    for name, operands in PRODUCTS.items():
        product = getattr(RECIPES["nvfp4_rht_sr"], name)
        tiles = (product.first.granularity, product.second.granularity)
        products[name] = {"format": "e2m1", **dict(zip(operands, tiles, strict=True))}
        products[name] |= {"scale": "e4m3", "hadamard": product.hadamard}
        products[name] |= {"stochastic": ["g"]} if "g" in operands else {}
    recipe = custom_recipe(products)
    assert recipe == dataclasses.replace(RECIPES["nvfp4_rht_sr"], name="custom")


@pytest.mark.parametrize("product, contracted", CONTRACTED.items())
def test_int8_scale_along_the_contracted_dimension_is_refused(product, contracted):
    for operand, granularity in contracted.items():
        operands = dict.fromkeys(PRODUCTS[product], "tensorwise") | {operand: granularity}
        with pytest.raises(ValueError, match=f"{product}.{operand}={granularity}"):
            custom_recipe({product: {"format": "int8", **operands}})


@pytest.mark.parametrize(
    "products, message",
    [
        ({"grad_bias": "high"}, "grad_bias"),
        ({"output": "low"}, "output=low"),
        ({"output": {"format": "int8", "x": "rowwise"}}, "x and w"),
        ({"output": INT8 | {"format": "int4"}}, "int4"),
        ({"output": INT8 | {"x": "blockwise"}}, "output.x=blockwise"),
        ({"output": INT8 | {"format": {"x": "int8"}}}, "for x, w"),
        ({"output": INT8 | {"format": {"x": "int8", "w": "e4m3"}}}, "int8 multiplies only int8"),
        ({"output": INT8 | {"x": "blocks"}}, "output.x=blocks: int8 needs one of rowwise"),
        ({"output": INT8 | {"scale": "e8m0"}}, "output.scale=e8m0: int8"),
        ({"output": E2M1 | {"x": "0x32"}}, "output.x=0x32: must be .* RxC"),
        ({"output": E2M1 | {"scale": "e8m1"}}, "scale=e8m1: must be one of float32, e8m0, e4m3"),
        ({"output": E2M1 | {"hadamar": True}}, "optionally scale, stochastic, hadamard"),
        ({"output": E2M1 | {"hadamard": 16}}, "hadamard=16: must be true or false"),
        ({"output": E2M1 | {"stochastic": ["g"]}}, "must be a list of x, w"),
        ("int8", "output, grad_input, grad_weight"),
    ],
)
def test_invalid_custom_recipe_is_refused(products, message):
    with pytest.raises(ValueError, match=message):
        custom_recipe(products)


@pytest.mark.parametrize(
    "x, w, message",
    [
        ("1x64", "64x64", "output.x=1x64: native e4m3 needs one of .* or x=1x128 with w=1x128 or"),
        ("1x128", "64x64", "output.x=1x128: native e4m3"),
        ("tensorwise", "128x128", "output.w=128x128: native e4m3"),
        ("rowwise", "columnwise", "output.w=columnwise: a scale of native e4m3 cannot vary"),
    ],
)
def test_granularities_that_no_kernel_multiplies_are_refused_in_any_recipe(x, w, message):
    with pytest.raises(ValueError, match=message):
        Recipe("own", Product(Operand("e4m3", x), Operand("e4m3", w), native=True))


def test_a_native_recipe_refuses_what_it_would_ignore_or_cannot_save():
    for option, value in {"scale": "e8m0", "stochastic": True}.items():
        operand = Operand("int8", "tensorwise", **{option: value})
        with pytest.raises(ValueError, match=f"output.{option}={value}: int8"):
            Recipe("own", Product(operand, operand, native=True))
    with pytest.raises(ValueError, match="saves_int8 of own"):
        dataclasses.replace(RECIPES["hw_fp8_blockwise"], name="own", saves_int8=True)
