"""Distributed checkpoints that are either complete or absent, and whose damage raises an error at loading.

    dcp.save(state, storage_writer=mx.checkpoint.Writer("run/step-100"))
    dcp.load(state, storage_reader=mx.checkpoint.Reader(mx.checkpoint.latest("run")))

The files are those of ``torch.distributed.checkpoint``, which can read them too. They are written into a folder with a
temporary name, which is renamed when everything is on the disk. A separate file stores a checksum of every tensor. An
error on one rank is raised on all of them by torch (``CheckpointException``).
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..core.arguments import check, instance

CHECKSUMS = "checksums.json"
FOLDER = instance((str, os.PathLike), "the path of a folder", lambda path: Path(path).name != "")
METADATA = ".metadata"
PIECE = 1 << 24
"""The number of bytes that are read at a time."""


def checksum(path: Path, offset: int = 0, length: int | None = None) -> int:
    """The CRC-32 of ``length`` bytes of a file from ``offset`` on; of fewer if the file ends before."""
    left, crc = path.stat().st_size if length is None else length, 0
    with path.open("rb") as file:
        file.seek(offset)
        while left > 0 and (piece := file.read(min(PIECE, left))):
            crc = zlib.crc32(piece, crc)
            left -= len(piece)
    return crc


@dataclass(frozen=True)
class _Checked(WriteResult):
    """What a rank reports about a tensor that it has written."""

    crc: int = 0


def _place(stored: Any) -> str:
    """The position of a tensor in the files, as a key."""
    return f"{stored.relative_path}:{stored.offset}:{stored.length}"


class Writer(FileSystemWriter):
    """Writes a checkpoint into the new folder ``path``; options are those of torch's ``FileSystemWriter``.

    Raises FileExistsError if ``path`` exists: each checkpoint has a folder of its own, and the last one stays until
    this one is complete. The remains of an interrupted run ("PATH.part") are overwritten.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        check("checkpoint.Writer", "path", path, FOLDER)
        self.to = Path(path)
        super().__init__(self._part, **options)

    @property
    def _part(self) -> Path:
        return self.to.with_name(self.to.name + ".part")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by torch: change the folder if ``dcp.save`` names one."""
        self.to = Path(checkpoint_id or self.to)
        super().reset(self._part)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by torch on every rank."""
        if not kwargs.get("use_collectives", True):
            raise NotImplementedError(
                "mx.checkpoint.Writer writes one checkpoint of all ranks; leave use_collectives=True"
            )
        if self.to.exists():
            raise FileExistsError(f"{self.to} already exists; give each checkpoint a folder of its own")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Called by torch on one rank before any rank writes: remove the files of an earlier attempt."""
        for left in self._part.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by torch on every rank: write its tensors and compute their checksums."""
        results = super().write_data(plan, planner).wait()
        if len(results) != len(plan.items):  # torch only prints the errors of its threads
            raise OSError(
                f"{len(plan.items) - len(results)} of {len(plan.items)} items were not written to {self._part}"
            )
        found: list[WriteResult] = []
        for result in results:
            stored = result.storage_data
            crc = checksum(self._part / stored.relative_path, stored.offset, stored.length)
            found.append(_Checked(result.index, result.size_in_bytes, stored, crc))
        checked: Future[list[WriteResult]] = Future()
        checked.set_result(found)
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by torch on one rank after all have written: write the checksums and rename the folder."""
        all_written = [cast(_Checked, result) for written in results for result in written]
        for name in {result.storage_data.relative_path for result in all_written}:
            if not (self._part / name).is_file():
                raise FileNotFoundError(
                    f"{self._part} has no {name}, which another rank has written; give all ranks a "
                    "folder that they share"
                )
        super().finish(metadata, results)
        sums = {_place(result.storage_data): result.crc for result in all_written}
        saved = {METADATA: checksum(self._part / METADATA), "tensors": sums, "time": time.time_ns()}
        with (self._part / CHECKSUMS).open("w") as file:
            json.dump(saved, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(self._part, self.to)


class Reader(FileSystemReader):
    """Reads a checkpoint of ``Writer``, after comparing the checksum of each tensor that this rank reads.

    Raises before anything is loaded, through torch on every rank: FileNotFoundError if there is no complete checkpoint;
    ValueError, with the names of file and tensor, if a file is too short or a byte has changed.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Called by torch on every rank."""
        path = Path(self.path)
        if not (path / CHECKSUMS).is_file():
            raise FileNotFoundError(
                f"{path} is not a complete checkpoint of mx.checkpoint.Writer: it has no {CHECKSUMS}; "
                "mx.checkpoint.latest(folder) gives the last complete one"
            )
        try:
            saved = json.loads((path / CHECKSUMS).read_text())
            self.sums, expected = dict(saved["tensors"]), int(saved[METADATA])
            found = checksum(path / METADATA)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(f"{path / CHECKSUMS} is damaged ({error!r}); load another checkpoint") from error
        self._compare(METADATA, "the table of contents", expected, found)
        return super().read_metadata(*args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called by torch on every rank before any reads: compare the checksums."""
        for index in {item.storage_index for item in plan.items}:
            stored = self.storage_data[index]
            file = Path(self.path) / stored.relative_path
            found = checksum(file, stored.offset, stored.length) if file.is_file() else None
            self._compare(stored.relative_path, repr(index.fqn), self.sums.get(_place(stored)), found)
        return super().prepare_local_plan(plan)

    def _compare(self, name: str, content: str, expected: int | None, found: int | None) -> None:
        if expected is None or expected != found:
            expected_, found_ = ("none" if crc is None else f"{crc:08x}" for crc in (expected, found))
            raise ValueError(
                f"{Path(self.path) / name} is damaged: the checksum of {content} is {found_}, and was {expected_}; "
                "load another checkpoint"
            )


def _time(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["time"])
    except (ValueError, KeyError, TypeError):
        return path.stat().st_mtime_ns  # damaged; ``Reader`` raises an error for it


def latest(folder: str | os.PathLike[str]) -> Path:
    """The checkpoint in ``folder`` that was finished last, by the time it stores.

    Raises FileNotFoundError if the folder has no complete checkpoint.
    """
    whole = [path for path in Path(folder).glob(f"*/{CHECKSUMS}") if path.parent.suffix != ".part"]
    if not whole:
        raise FileNotFoundError(f"{folder} has no complete checkpoint of mx.checkpoint.Writer")
    return max(whole, key=_time).parent
