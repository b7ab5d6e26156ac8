"""Packed linear layers give what `nn.Linear` gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernels.packed_linear import PackedLinear, can_pack, pack_linears

CPU = torch.device("cpu")
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, CPU)]

pytestmark = pytest.mark.skipif(not DTYPES, reason="this build of PyTorch has no oneDNN")


def test_what_can_be_packed() -> None:
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("meta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 64), (8, 64), (63, 64), (257, 64)])
@torch.inference_mode()
def test_equals_linear(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=bias).to(dtype)
    x = torch.randn(*shape).to(dtype)
    made, plain = PackedLinear(linear)(x), linear(x)
    assert made.dtype == dtype
    assert made.shape == (*shape[:-1], 96)
    exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    if dtype is torch.float32:
        torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-5)
    else:
        # The same float32 sum, perhaps in another order, and one rounding: at most one step of bfloat16 apart.
        step = 2.0**-7 * torch.maximum(made.float().abs(), plain.float().abs())
        assert ((made.float() - plain.float()).abs() <= step).all()
        assert (made != plain).float().mean() < 0.01
    torch.testing.assert_close(made.double(), exact, rtol=2.0**-7, atol=1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_weights_at_any_place_are_packed_and_freed() -> None:
    class Own(nn.Linear):
        """A subclass may compute something else: it is left alone."""

    model = nn.ModuleDict(
        {
            "head": nn.Linear(8, 8),
            "layers": nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2)]),
            "own": Own(8, 8),
        }
    )
    pack_linears(model)
    packed = [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    assert packed == ["head", "layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]
    assert type(model["own"]) is Own
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert [name for name, _ in model.named_parameters() if name.endswith("weight")] == ["own.weight"]
