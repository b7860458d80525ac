"""The float8 instructions of sm_89 and later in Triton's interpreter, so that code for devices that have them runs."""

import pytest
import torch

from mxtensor.kernels.runtime import triton_launch


def rounded(values, kind):
    """``cvt.rn.satfinite``: to nearest, an infinity to the largest number, each NaN to 0x7F (PTX ISA, cvt)."""
    largest = torch.finfo(kind).max
    codes = values.clamp(-largest, largest).to(kind).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, codes)


@pytest.fixture
def float8_instructions(monkeypatch):
    """Kernels are built for sm_90, and their inline PTX is computed by torch."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def inline_asm(builder, text, constraints, values, types, pure, pack):
        (source,) = values
        kinds = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}
        (kind,) = (kind for name, kind in kinds.items() if f"cvt.rn.satfinite.{name}.f32" in text)
        codes = rounded(torch.from_numpy(source.data.copy()), kind)
        handle = TensorHandle(codes.numpy(), tl.uint8)
        return type("Call", (), {"get_result": lambda self, i: handle})()

    def convert(builder, source, kind, rounding):
        float8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}.get(source.dtype.scalar)
        if float8 is None or kind.scalar != tl.float32:
            return others(builder, source, kind, rounding)
        values = torch.from_numpy(source.data.copy()).view(torch.uint8).view(float8)
        return TensorHandle(values.float().numpy(), tl.float32)

    others = InterpreterBuilder.create_fp_to_fp  # it takes a NaN of float8 for a number
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", convert)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", inline_asm)
    monkeypatch.setattr(triton_launch, "instructions_of", lambda device: (9, 0))
