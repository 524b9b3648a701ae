"""The table of recipes, and custom recipes from a config."""

import pytest

from lowprec.nn.recipe import PRODUCTS, RECIPES, Operand, Product, custom_recipe

WORDS = {"rowwise": "row", "columnwise": "column", "tensorwise": "tensor", "blocks": "blocks"}
INT8 = {"format": "int8", "x": "rowwise", "w": "tensorwise"}


def written(product):
    """A product in the notation of the oracle's table."""
    if product is None:
        return None
    operands = (product.first, product.second)
    return tuple(f"{operand.format} {WORDS[operand.granularity]}" for operand in operands)


def test_recipes_match_the_oracles_table(oracle):
    found = {name: tuple(written(getattr(r, p)) for p in PRODUCTS) for name, r in RECIPES.items()}
    assert found == oracle.TABLE


@pytest.mark.parametrize("name", RECIPES)
def test_int8_and_hw_fp8_are_native(name):
    products = [getattr(RECIPES[name], product) for product in PRODUCTS]
    native = not name.startswith("fp8")
    assert all(product is None or product.native == native for product in products)
    assert RECIPES[name].is_native == native
    assert RECIPES[name].saves_int8 == (name == "switchback_m")
    assert RECIPES[name].function == (name != "high")


def test_custom_recipe_parses_products():
    recipe = custom_recipe(
        {
            "output": INT8,
            "grad_input": {"format": {"g": "e5m2", "w": "e4m3"}, "g": "rowwise", "w": "columnwise"},
            "grad_weight": "high",
        }
    )
    assert recipe.output == RECIPES["switchback"].output
    e5m2, e4m3 = Operand("e5m2", "rowwise"), Operand("e4m3", "columnwise")
    assert recipe.grad_input == Product(e5m2, e4m3, native=False)
    assert recipe.grad_weight is None and recipe.name == "custom"


def test_missing_products_are_16_bit():
    assert custom_recipe({}) == custom_recipe(dict.fromkeys(PRODUCTS, "high"))


def test_fake_quantized_scale_may_vary_along_any_dimension():
    for granularity in ("rowwise", "columnwise", "tensorwise"):
        recipe = custom_recipe({"output": {"format": "e2m1", "x": granularity, "w": granularity}})
        assert recipe.output.first == Operand("e2m1", granularity) and not recipe.is_native


@pytest.mark.parametrize(
    "product, operand, granularity",
    [
        ("output", "x", "columnwise"),
        ("output", "w", "columnwise"),
        ("grad_input", "g", "columnwise"),
        ("grad_input", "w", "rowwise"),
        ("grad_weight", "g", "rowwise"),
        ("grad_weight", "x", "rowwise"),
    ],
)
def test_int8_scale_along_the_contracted_dimension_is_refused(product, operand, granularity):
    given = dict.fromkeys(PRODUCTS[product], "tensorwise") | {operand: granularity}
    with pytest.raises(ValueError, match=f"{product}.{operand}={granularity}"):
        custom_recipe({product: {"format": "int8", **given}})


@pytest.mark.parametrize(
    "products, message",
    [
        ({"grad_bias": "high"}, "grad_bias"),
        ({"output": "low"}, "output=low"),
        ({"output": {"format": "int8", "x": "rowwise"}}, "x and w"),
        ({"output": INT8 | {"g": "rowwise"}}, "x and w"),
        ({"output": INT8 | {"format": "int4"}}, "int4"),
        ({"output": INT8 | {"x": "blockwise"}}, "output.x=blockwise"),
        ({"output": INT8 | {"format": {"x": "int8"}}}, "for x, w"),
        ({"output": INT8 | {"format": {"x": "int8", "w": "e4m3"}}}, "int8 multiplies only int8"),
        ({"output": INT8 | {"format": 8}}, "8"),
        ("int8", "output, grad_input, grad_weight"),
        (["output"], "output, grad_input, grad_weight"),
        (None, "output, grad_input, grad_weight"),
    ],
)
def test_invalid_custom_recipe_is_refused(products, message):
    with pytest.raises(ValueError, match=message):
        custom_recipe(products)
