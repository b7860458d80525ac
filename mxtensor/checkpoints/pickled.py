"""State dicts that ``torch.save`` wrote: ordinary tensors, those of this package and those of torchao. Read only.

``torch.load(weights_only=True)`` runs no code of a file. torchao need not be installed: the names of its classes stand
for subclasses of ``StandIn`` and ``Fields``, which only keep what the file says. A process that has imported torchao
may get its own classes, which have the same names and attributes.
"""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.names import dtype_name
from ..tensor.mxtensor import MXTensor
from .layout import Layout
from .reading import Checkpoint, Entry, Stored, check_file, weight_map
from .torchao import CLASSES

ENDINGS = (".bin", ".pt", ".pth")
ONE_FILE, INDEX = PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of a folder: all tensors, or the list of its shards."""
NESTED = ("state_dict", "model", "module", "model_state_dict")
"""Keys under which training scripts store the state dict among other things."""


class StandIn(Tensor):
    """A tensor of torchao: the attributes that the file gives it, without a way to compute."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"a tensor of torchao's {cls.__name__} was only read from a file; it cannot run {func}"
        )


class Fields:
    """A dataclass or the member of an enum of torchao: its fields, or its ``value``."""

    def __init__(self, value: object = None) -> None:
        self.value = value


_MX, _WORKFLOWS = "torchao.prototype.mx_formats", "torchao.quantization.quantize_.workflows"
_COMMON = "torchao.quantization.quantize_.common"
TENSORS = (
    f"{_MX}.mx_tensor.MXTensor", f"{_MX}.nvfp4_tensor.NVFP4Tensor", "torchao.quantization.Float8Tensor",
    f"{_WORKFLOWS}.float8.float8_tensor.Float8Tensor",
)  # fmt: skip
OBJECTS = (
    f"{_MX}.mx_tensor.QuantizeTensorToMXKwargs", f"{_MX}.nvfp4_tensor.QuantizeTensorToNVFP4Kwargs",
    f"{_MX}.config.ScaleCalculationMode", f"{_COMMON}.kernel_preference.KernelPreference",
    f"{_WORKFLOWS}.float8.float8_tensor.QuantizeTensorToFloat8Kwargs", "torchao.quantization.granularity.PerRow",
    "torchao.quantization.granularity.PerTensor", "torchao.quantization.granularity.PerBlock",
)  # fmt: skip
"""Full names of classes in files of torchao 0.18."""


STAND_INS: list[Any] = [
    (type(name.rpartition(".")[2], (base,), {}), name)
    for base, names in ((StandIn, TENSORS), (Fields, OBJECTS))
    for name in names
]
"""(class, full name of a class of torchao)."""


def open_pickled(path: Path) -> Checkpoint:
    """Open a file, or a folder with ``pytorch_model.bin`` or its shards. Raises ValueError that names the file."""
    out = Checkpoint(path, kind="pickle")
    files = [path] if path.is_file() else [path / ONE_FILE]
    if (path / INDEX).is_file():
        files = sorted({path / name for name in weight_map(path / INDEX).values()})
    for file in files:
        size = file.stat().st_size
        for name, t in state_dict_of(file).items():
            out.add(name, Stored(file, dtype_name(t.dtype), tuple(t.shape), mapped=(t, size)))
    return out


def _load(file: Path) -> Any:
    check_file(file)
    if not zipfile.is_zipfile(file):  # before torch 1.6; such a file cannot be mapped
        return torch.load(file, map_location="cpu", weights_only=True)
    with zipfile.ZipFile(file) as archive:
        packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"its record {packed[0]:.80} is compressed, which torch.save does not do")
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def state_dict_of(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Raises ValueError for anything but a state dict."""
    try:
        with torch.serialization.safe_globals(STAND_INS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Validating sparse tensor", UserWarning)  # they are refused below
            found = _load(file)
    except Exception as error:  # a file that is not valid raises whatever its words lead to
        text = " ".join((str(error) or repr(error)).split()).rpartition("WeightsUnpickler error: ")[2]
        text = text.partition(" Please use")[0].partition(" Check the doc")[0]  # no advice to run the code of a file
        raise ValueError(f"{file} cannot be read by torch.load(weights_only=True): {text:.200}") from error
    inner = [key for key in NESTED if isinstance(found, dict) and isinstance(found.get(key), dict)]
    found = found[inner[0]] if inner else found
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {described(found)}; it must hold a state dict, tensors by name")
    for name, t in found.items():
        if not isinstance(name, str) or not isinstance(t, Tensor):
            raise ValueError(f"{file} holds {described(t)} as {name!r:.80}; a state dict has tensors by name")
        known = isinstance(t, MXTensor) or (type(t) in (Tensor, torch.nn.Parameter) and not t.is_quantized)
        stands_in = type(t).__name__ in CLASSES and not isinstance(t, MXTensor)
        if not stands_in and (not known or t.layout is not torch.strided or t.is_meta):
            raise ValueError(f"{file}, tensor {name}: only dense tensors are supported, got {described(t)}")
    return found


def _built(t: Tensor) -> Tensor:
    if isinstance(t, MXTensor):
        return t.detach()
    if type(t).__name__ not in CLASSES:
        return t.detach().clone()
    components = {name: vars(t).get(name) for name in ("qdata", "scale", "per_tensor_scale")}
    present = {name: value for name, value in components.items() if value is not None}
    if not {"qdata", "scale"} <= set(present) or any(
        type(value) is not Tensor or value.layout is not torch.strided or value.is_meta for value in present.values()
    ):
        raise ValueError(f"torchao's {type(t).__name__} needs the tensors qdata and scale, got {sorted(present)}")
    attributes = {"dtype": t.dtype} | {name: value for name, value in vars(t).items() if name not in components}
    return CLASSES[type(t).__name__]({name: value.clone() for name, value in present.items()}, attributes)


PICKLED = Layout(
    "pickle",
    "torch.save of a state dict, torchao included (read only)",
    detect=lambda checkpoint: checkpoint.kind == "pickle",
    read=lambda checkpoint: {name: Entry((name,), _built) for name in checkpoint.tensors},
    scales=(),
    formats="those of this package and of the layout torchao",
)
