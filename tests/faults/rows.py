"""The planted faults: realistic mistakes, at least one in every room, each of which some test has to catch.

``near`` names the tests that are run first; any test may catch a fault.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake: ``old``, which occurs once in ``mxtensor/FILE``, is replaced by ``new``."""

    name: str
    file: str
    old: str
    new: str
    near: tuple[str, ...]


FAULTS = (
    # numerics: the definition
    Fault("ties of 4-bit codes away from zero", "numerics/elements.py",
          "code += (1 << (shift - 1)) - 1 -", "code += (1 << (shift - 1)) -", ("numerics",)),
    Fault("nibbles swapped in unpack", "numerics/elements.py",
          "return data & 0xF, data >> 4", "return data >> 4, data & 0xF", ("numerics",)),
    Fault("e8m0 clamp off by one", "numerics/reference.py",
          "return byte.clamp(0, 254)", "return byte.clamp(1, 254)", ("numerics",)),
    Fault("rceil rounds the scale down", "numerics/reference.py",
          "torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)",
          "torch.where(exponent > 0, mantissa > 1, mantissa > 0x400000)", ("numerics",)),
    Fault("global scale inverted", "numerics/reference.py",
          "global_scale = torch.where(usable, tensor_amax / largest, 1.0)",
          "global_scale = torch.where(usable, largest / tensor_amax, 1.0)", ("numerics",)),
    Fault("bias of e3m2", "numerics/formats.py",
          'ElementFormat("e3m2", 3, 2, bias=3, max=28.0', 'ElementFormat("e3m2", 3, 2, bias=4, max=14.0',
          ("numerics",)),
    Fault("atoms of the scale swizzle not transposed", "numerics/swizzle.py",
          "return tiles.movedim(-2, -4).transpose(-2, -3).flatten(-5)", "return tiles.movedim(-2, -4).flatten(-5)",
          ("numerics",)),
    Fault("a global scale of any size", "numerics/validate.py",
          "global_scale.numel() != 1", "global_scale.numel() < 1", ("tensor", "numerics")),
    Fault("map forgets the global scale", "numerics/operand.py",
          "else fn(self.global_scale)", "else self.global_scale", ("tensor", "ops", "numerics")),
    # core
    Fault("readable_size counts by 1000", "core/shapes.py", "value < 1024", "value < 1000", ("core", "tensor")),
    Fault("strides of empty dimensions", "core/shapes.py",
          "step *= max(size, 1)", "step *= size", ("tensor", "ops")),
    Fault("an op may have two rules", "core/dispatch.py", "if key in table:", "if False:", ("core",)),
    # recipe
    Fault("high_precision_backward keeps dgrad's weight", "recipe/base.py",
          "weight, grad = TensorCasts(weight.rowwise), TensorCasts()", "grad = TensorCasts()",
          ("recipe", "training")),
    Fault("a recipe's row forgets the seed", "recipe/linear_recipe.py",
          'None if seed is None else int(seed)', "None", ("recipe", "tensor")),
    # kernels: casts
    Fault("C++: low nibble shifted by 3", "kernels/cpu/elements.h",
          "codes[2 * i] | codes[2 * i + 1] << 4", "codes[2 * i] | codes[2 * i + 1] << 3", ("kernels/quantize",)),
    Fault("C++: amax of the last values of a tile row", "kernels/cpu/quantize.cpp",
          "fold(tile + r * x.step, width(c), most)", "fold(tile + r * x.step, width(c) - 1, most)",
          ("kernels/quantize",)),
    Fault("C++: multiplier of nvfp4 without the global scale", "kernels/cpu/quantize.cpp",
          "const float per_amax = encode * e.inverse_max, decode = 1.0f / encode;",
          "const float per_amax = encode * e.inverse_max, decode = 1.0f;", ("kernels/quantize",)),
    Fault("slices of rows overlap their scales", "kernels/quantize/blocked.py",
          "scale.narrow(0, start // block_rows,", "scale.narrow(0, 0,", ("kernels/quantize",)),
    Fault("Hadamard matrix not normalized", "kernels/quantize/hadamard.py",
          "(signs >> i)) / 4", "(signs >> i)) / 2", ("kernels/quantize", "training", "te")),
    Fault("Triton: amax of bfloat16 not widened", "kernels/triton_device/elements.py",
          "return largest.to(tl.int32) << 16", "return largest.to(tl.int32) << 15", ("kernels/quantize",)),
    Fault("Triton: 6-bit codes packed with a wrong shift", "kernels/triton_device/quantize.py",
          "store_tile(to + 2, (v2 >> 4) | (v3 << 2), inside, EVEN)",
          "store_tile(to + 2, (v2 >> 4) | (v3 << 1), inside, EVEN)", ("kernels/quantize",)),
    Fault("Triton: the oldest amax is the newest", "kernels/triton_device/amax_history.py",
          "history_ptr + (row - 1) * COLUMNS", "history_ptr + row * COLUMNS", ("kernels/quantize",)),
    Fault("delayed scaling keeps a zero amax", "kernels/quantize/amax_history.py",
          "(largest > 0) & largest.isfinite()", "largest.isfinite()", ("training", "kernels/quantize")),
    # kernels: products
    Fault("dequant drops alpha", "kernels/gemm/dequant.py",
          "return add(bias, a, b, alpha=args.alpha, beta=beta)", "return add(bias, a, b, beta=beta)",
          ("kernels/gemm", "ops")),
    Fault("sliced product puts every slice first", "kernels/gemm/dequant.py",
          "target = out.narrow(1, start, length)", "target = out.narrow(1, 0, length)", ("kernels/gemm",)),
    Fault("emulated rounds the operands to bfloat16", "kernels/gemm/emulated.py",
          "torch.float64 if args.out_dtype is torch.float64 else torch.float32",
          "torch.float64 if args.out_dtype is torch.float64 else torch.bfloat16", ("kernels/gemm",)),
    Fault("dot_scaled drops beta", "kernels/triton_device/dot_scaled.py",
          "total += beta * tl.load(bias + origin", "total += tl.load(bias + origin", ("kernels/gemm",)),
    Fault("dot_scaled: groups start at zero", "kernels/triton_device/dot_scaled.py",
          "start + (tile - (until - tiles)) * P.tile_m", "(tile - (until - tiles)) * P.tile_m", ("kernels/gemm",)),
    Fault("grouped rows get the first weight", "kernels/gemm/dequant.py",
          "out[start:end] = run(left[start:end], matrix(b, i), args)",
          "out[start:end] = run(left[start:end], matrix(b, 0), args)", ("kernels/gemm", "ops")),
    # kernels for few rows, and what runs them
    Fault("CUDA: bank swizzle of the codes", "kernels/cuda/small_m_mma.cuh",
          "row + ((at + 4 * i) ^ turn)", "row + (at + 4 * i)", ("kernels/small_m",)),
    Fault("CUDA: a NaN scale is a number", "kernels/cuda/dequant_words.cuh",
          "scale == NAN_SCALE ? float_of_bits(0x7FFFFFFF) :", "scale == 256 ? float_of_bits(0x7FFFFFFF) :",
          ("kernels/small_m",)),
    Fault("small_m: alignment of the strides ignored", "kernels/small_m/config.py",
          "bits |= stride", "bits |= 0", ("kernels/small_m",)),
    Fault("cache files do not depend on the key", "kernels/runtime/disk_cache.py",
          "repr(key).encode()", "b''", ("kernels/runtime", "kernels/quantize")),
    Fault("Triton on devices that are too old", "kernels/runtime/triton_launch.py",
          "if spec.capability < OLDEST:", "if spec.capability < (0, 0):", ("kernels/runtime", "kernels/gemm")),
    # tensor
    Fault("copies miscounted", "tensor/mxtensor.py",
          "+ 2 * (self._columnwise is not None)", "+ (self._columnwise is not None)", ("tensor",)),
    Fault("pickle drops the strides", "tensor/mxtensor.py",
          "size, tuple(stride))\n    return torch.nn.Parameter", "size)\n    return torch.nn.Parameter",
          ("tensor", "distributed")),
    # ops
    Fault("addmm drops beta", "ops/matmul.py",
          '"addmm", Side(a, False), Side(b, True), bias, kwargs.get("alpha", 1), kwargs.get("beta", 1))',
          '"addmm", Side(a, False), Side(b, True), bias, kwargs.get("alpha", 1))', ("ops", "kernels/gemm")),
    Fault("bmm with the operand not transposed", "ops/matmul.py",
          '"bmm", Side(a, False), Side(b, True))', '"bmm", Side(a, False), Side(b, False))',
          ("ops", "kernels/gemm")),
    Fault("slices that cut a block stay quantized", "ops/slice.py",
          "step == 1 and start % block == 0 and", "step == 1 and", ("ops",)),
    Fault("columnwise dimensions in rowwise order", "ops/layout.py",
          "dims[-2:] = reversed(dims[-2:])", "pass", ("ops",)),
    Fault("writes forget the columnwise copy", "ops/inplace.py",
          "quantize_operand(values.transpose(-1, -2), w.recipe.stored)",
          "quantize_operand(w.dequantize().transpose(-1, -2), w.recipe.stored)", ("ops", "tensor")),
    # training
    Fault("dgrad by the rowwise copy of the weight", "training/operands.py",
          "return values.rowwise, values.columnwise", "return values.rowwise, values.rowwise", ("training",)),
    Fault("wgrad's operand not transposed", "training/operands.py",
          "out[1] = x.transpose(0, 1)", "out[1] = x", ("training",)),
    Fault("the gradient of the bias in the gradient's dtype", "training/linear.py",
          "g.sum(0, dtype=torch.float32)", "g.sum(0, dtype=torch.bfloat16)", ("training",)),
    Fault("a bias is dropped when both operands are plain", "training/linear.py",
          "return torch.nn.functional.linear(a.to(dtype), b.to(dtype), bias)",
          "return torch.nn.functional.linear(a.to(dtype), b.to(dtype))", ("training",)),
    Fault("delayed scaling steps in evaluation", "training/delayed_scaling.py",
          "if not torch.is_grad_enabled() and not in_first_pass():", "if False:", ("training",)),
    Fault("masters overwritten by stale parameters", "training/optim.py",
          "if p._version != self._written[p]:", "if True:", ("training",)),
    Fault("skipped steps not counted", "training/grad_scaler.py",
          "for f in found) > 0).long()", "for f in found) > 1).long()", ("training",)),
    Fault("the last group is lost", "training/grouped.py",
          "y = torch.cat(list(groups))", "y = torch.cat([*groups[:-1], groups[0]])", ("nn", "training")),
    # te, distributed, compile
    Fault("general_gemm: beta ignored", "te/general_gemm.py",
          "(1.0 if beta is None else beta) * out.to(wide)", "out.to(wide)", ("te",)),
    Fault("quantizers make a columnwise copy of square tiles", "te/quantizer_base.py",
          "if x.dim() == 1 or self.cast.format.square or not self.columnwise:",
          "if x.dim() == 1 or not self.columnwise:", ("te",)),
    Fault("gathered columns in the wrong order", "distributed/all_gather_linear.py",
          ".view(world, n, m).transpose(0, 1).reshape(n, world * m)", ".reshape(n, world * m)", ("distributed",)),
    Fault("a damaged checkpoint loads", "distributed/checkpoint.py",
          "if expected is None or expected != found:", "if expected is None:", ("distributed",)),
    Fault("parts that are not whole blocks", "distributed/tensor_parallel.py",
          "if extent % world:", "if extent % 1:", ("distributed",)),
    Fault("products not waiting for their weights", "compile/launches.py",
          "if not _is_input(value):", "if _is_input(value):", ("compile",)),
    # nn, convert, report
    Fault("zero-centered gamma without its 1", "nn/norm.py",
          "weight = 1 + weight", "weight = weight", ("nn",)),
    Fault("padding of a group that is whole already", "nn/padding.py",
          "return [-(-n // size) * size for n in sizes]", "return [(n // size + 1) * size for n in sizes]", ("nn",)),
    Fault("rotary embedding turns the wrong way", "nn/rope.py",
          "else torch.cat((-b, a), -1)", "else torch.cat((b, -a), -1)", ("nn",)),
    Fault("embeddings are quantized by default", "convert/quantize.py",
          "return not isinstance(module, nn.Embedding) and", "return", ("convert",)),
    Fault("decibels of amplitudes", "report/model_report.py",
          "10 * math.log10(", "20 * math.log10(", ("report",)),
    Fault("new measurements lose the old ones", "report/tune.py",
          "for row in (*old, *new)", "for row in new", ("report",)),
)  # fmt: skip
