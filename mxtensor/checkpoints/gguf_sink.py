"""Writing a GGUF file by the package ``gguf``, which needs the sizes of all tensors before the first byte.

The bytes of tensors wait in a file beside the destination. A GGUF source hands on its header: the architecture, the
tokenizer and all other fields. Without one, the header has the architecture only: tools read the tensors, but llama.cpp
needs a file that its own converter has made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .destination import Destination
from .source import Checkpoint, needs


class GGUFSink(Destination):
    """A context manager that collects the bytes of tensors and writes one file.

    ``path``: a file that ends in ``.gguf``. ``source``: the checkpoint whose fields are copied, if it is a GGUF file.
    Raises ValueError for another path, FileExistsError if it exists, unless ``overwrite``.
    """

    def __init__(
        self, path: str | Path, shard_bytes: int, overwrite: bool = False, source: Checkpoint | None = None
    ) -> None:
        if Path(path).suffix != ".gguf":
            raise ValueError(f"the layout gguf is one file; pass a name that ends in .gguf, not {path}")
        super().__init__(path, overwrite)
        self.source = source
        self._infos: dict[str, tuple[tuple[int, ...], int, str]] = {}
        """Name -> (shape of its bytes, number of bytes, type of GGUF)."""
        self._spool = (self.folder / "tensors").open("wb")

    def add(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Add the bytes of a tensor; ``metadata`` has its type of GGUF by name."""
        for name, t in tensors.items():
            if name in self._infos:
                raise ValueError(f"two tensors would be stored as {name}; rename one of them")
            t = t.detach().to("cpu").contiguous()
            raw = (t if t.dim() else t.reshape(1)).view(torch.uint8)
            self._infos[name] = tuple(raw.shape), raw.numel(), (metadata or {})[name]
            self.checked_write(self._spool.write, memoryview(raw.reshape(-1).numpy()))  # type: ignore[arg-type]

    def finish(self, files: Mapping[str, Any], source: Path | None = None) -> None:
        """Write the file and move it to its place. ``files``: ``config.json`` names the architecture."""
        config = files.get("config.json") or {}
        self.checked_write(self._finish, str(config.get("model_type", "unknown")))

    def _finish(self, architecture: str) -> None:
        gguf = needs("gguf", "gguf")
        self._spool.close()
        reader = getattr(self.source, "reader", None)
        names = {} if reader is None else reader.fields
        key = gguf.Keys.General.ARCHITECTURE
        architecture = names[key].contents() if key in names else architecture
        out = self.folder / "out.gguf"
        writer = gguf.GGUFWriter(out, architecture)
        try:
            self._fields(gguf, writer, names)
            for name, (shape, size, kind) in self._infos.items():
                writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, gguf.GGMLQuantizationType[kind])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            self._tensors(writer)
        finally:
            writer.close()
        self.move_file(out.name)

    @staticmethod
    def _fields(gguf: Any, writer: Any, fields: Mapping[str, Any]) -> None:
        """Copy the fields of the source; what llama.cpp calls the type of the file is guessed from its tensors."""
        file_type = gguf.Keys.General.FILE_TYPE
        for name, field in fields.items():
            value = field.contents()
            if name.startswith("GGUF.") or name in (gguf.Keys.General.ARCHITECTURE, file_type) or value in (None, []):
                continue
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, kind, sub_type=inner)
            if name == gguf.Keys.General.ALIGNMENT:
                writer.data_alignment = int(value)
        writer.add_uint32(file_type, int(gguf.LlamaFileType.GUESSED))

    def _tensors(self, writer: Any) -> None:
        with open(self._spool.name, "rb") as spool:
            for _, size, _ in self._infos.values():
                writer.write_tensor_data(np.fromfile(spool, np.uint8, size))

    def __exit__(self, *error: Any) -> None:
        self._spool.close()
        super().__exit__(*error)
