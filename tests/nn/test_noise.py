import math

import pytest
import torch

from lowprec.formats import E4M3, E5M2, INT8, parse_format
from lowprec.nn.noise import dot_error_variance, error_variance, operand_noise, sqnr_db
from lowprec.ops import reference

FORMATS = [INT8, E4M3, E5M2, parse_format("e3m2")]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_sqnr_is_signal_over_noise_in_db():
    exact = torch.tensor([3.0, -4.0])
    assert sqnr_db(exact, exact + torch.tensor([0.3, 0.4])) == pytest.approx(20, abs=1e-5)
    assert sqnr_db(exact, exact) == math.inf
    assert sqnr_db(exact * 0, exact) == -math.inf
    assert math.isnan(sqnr_db(exact, exact * torch.nan))
    for pair in ((exact, exact * torch.inf), (exact * torch.inf, exact)):
        assert math.isnan(sqnr_db(*pair))


def test_underflowed_elements_and_the_peak_of_an_operand():
    x = torch.tensor([[100.0, -100.0, 0.1, 0.0], [1.0, 0.9, -0.5, 0.001]])
    for format, granularity, underflowed in (
        (INT8, "rowwise", 2 / 7),
        (INT8, "tensorwise", 2 / 7),
        (E4M3, "tensorwise", 0),
    ):
        x_hat = reference.fake_quantize(x, format, granularity, torch.float32)
        result = operand_noise(x, x_hat)
        assert result["underflowed"] == pytest.approx(underflowed)
    assert operand_noise(torch.zeros(2, 3), torch.zeros(2, 3))["underflowed"] == 0
    x = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    assert operand_noise(x, x)["peak"] == pytest.approx(4 / 2.5)


@pytest.mark.parametrize("granularity", ["rowwise", "columnwise", "tensorwise"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_operand_error_is_predicted_from_the_steps_of_its_format(format, granularity):
    x = normal(128, 256)
    x[0] = 0
    measured = (x - reference.fake_quantize(x, format, granularity, torch.float32)).square().mean()
    assert error_variance(x, format, granularity) == pytest.approx(measured.item(), rel=0.06)


@pytest.mark.parametrize(
    ("formats", "granularities"),
    [
        ((INT8, INT8), ("rowwise", "tensorwise")),
        ((INT8, INT8), ("rowwise", "rowwise")),
        ((E4M3, E4M3), ("tensorwise", "tensorwise")),
        ((E5M2, E4M3), ("rowwise", "tensorwise")),
    ],
    ids=str,
)
def test_dot_product_error_grows_with_the_inner_dimension_as_predicted(formats, granularities):
    result = {}
    for K in (64, 4096):
        x, w = 3 * normal(96, K), 0.02 * normal(64, K, seed=1) + 0.01
        measured, predicted = dot_error_variance(x, w, formats, granularities)
        assert measured == pytest.approx(predicted, rel=0.1)
        result[K] = measured
    growth = result[4096] / result[64]
    # a factor of 64 from the number of terms; for int8 more, as the scale grows with the elements
    assert 60 < growth < (150 if formats[0] is INT8 else 75)
