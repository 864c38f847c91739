"""Promise: a row of INT8 depends on itself alone, and is near what it was."""

import torch

from gpuscore_kernels.quantized import quantize_rows


def rows(count: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count * width)
    scale = torch.logspace(-3, 3, count)[:, None]
    return (torch.randn(count, width, generator=generator) * scale).bfloat16()


def test_rows_have_254_steps_from_end_to_end_and_round_ties_to_even() -> None:
    x = torch.tensor([[127.0, -127.0, 2.5, 1.5, -0.5, 0.6], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    q, scale = quantize_rows(x)
    assert q.tolist() == [[127, -127, 2, 2, 0, 1], [0] * 6]
    assert scale.tolist() == [1.0, torch.finfo(torch.float32).eps]


def test_a_row_has_its_own_scale_and_is_near_what_it_was() -> None:
    x = rows(7, 111)
    q, scale = quantize_rows(x)
    alone = [quantize_rows(row[None]) for row in x]
    assert torch.equal(q, torch.cat([row_q for row_q, _ in alone]))
    assert torch.equal(scale, torch.cat([row_scale for _, row_scale in alone]))
    error = (q.float() * scale[:, None] - x.float()).abs()
    assert bool((error <= 0.51 * scale[:, None]).all())


def test_rows_that_are_not_finite_have_such_scales() -> None:
    x = rows(3, 63)
    x[0, 5], x[1, 6] = torch.nan, -torch.inf
    _, scale = quantize_rows(x)
    assert scale.isfinite().tolist() == [False, False, True]
