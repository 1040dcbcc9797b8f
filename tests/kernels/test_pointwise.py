"""The polynomial that stands in for the special-function unit, step by step in float32."""

import numpy as np

from dash_attn.kernels.sm90.config import EXP2_COEFFICIENTS, ROUNDER


def exp2_polynomial(x: np.ndarray) -> np.ndarray:
    """As pointwise.exp2_polynomial; multiply and add rounded apart, which is a little worse than the GPU's FMA."""
    x = np.maximum(x, np.float32(-126))
    rounded = x + np.float32(ROUNDER)
    r = x - (rounded - np.float32(ROUNDER))
    p = np.full_like(x, EXP2_COEFFICIENTS[0])
    for c in EXP2_COEFFICIENTS[1:]:
        p = p * r + np.float32(c)
    return ((rounded.view(np.int32) << 23) + p.view(np.int32)).view(np.float32)


def test_error():
    x = np.linspace(-125, 20, 1_000_001, dtype=np.float32)
    assert np.abs(exp2_polynomial(x) / np.exp2(x.astype(np.float64)) - 1).max() < 4.5e-6


def test_far_below_it_stays_small():
    x = np.array([-126.4, -200, -1e30, -np.inf], np.float32)
    assert (exp2_polynomial(x) <= 2.0**-125).all() and (exp2_polynomial(x) >= 0).all()
