"""What an interrupted run has finished, on disk beside its unfinished output, and what it may be continued with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.locate import read_json_object
from quantkit.checkpoint.outdir import explain, replace_file, sync_tree
from quantkit.errors import CheckpointError, UsageError

LEDGER_FILE = "ledger.json"
_RESTART = "repeat the command as it was, or pass `--restart` to start over"


@dataclass(slots=True)
class Ledger:
    """The progress of one run. It names only what is on disk, whatever moment a crash chooses.

    Attributes:
        directory: the working directory of the run.
        place: where the user asked for the output; messages name it.
        fingerprint: everything that decides the output, as JSON values; nested by topic.
        done: finished blocks.
        state: what the caller must know to go on, as JSON values.
    """

    directory: Path
    place: Path
    fingerprint: Mapping[str, Any]
    done: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path, place: Path, fingerprint: Mapping[str, Any]) -> Ledger:
        """Read what an earlier run left, if anything.

        Raises:
            UsageError: that run would have written another output, and in what they differ; or the file is damaged.
        """
        wanted = json.loads(json.dumps(fingerprint))
        file = directory / LEDGER_FILE
        if not file.exists():
            return cls(directory, place, wanted)
        try:
            found: dict[str, Any] = read_json_object(file)
            before, done, state = found["fingerprint"], int(found["done"]), dict(found["state"])
        except (CheckpointError, KeyError, TypeError, ValueError):
            raise UsageError(
                f"what an interrupted run left for `{place}` is damaged", "pass `--restart` to start over"
            ) from None
        if differences := list(_differences(before, wanted)):
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise UsageError(
                f"an interrupted run for `{place}` differs from this one: {'; '.join(differences[:3])}{more}", _RESTART
            )
        return cls(directory, place, wanted, done, state)

    def finished(self, done: int, state: Mapping[str, Any], tensors: Iterable[Mapping[str, Tensor]]) -> None:
        """Note that blocks before `done` are on disk, and keep `tensors` for the next.

        Args:
            tensors: sets of tensors, one in memory at a time.

        Raises:
            ResourceError: the disk refuses; what was noted before still holds.
        """
        with explain(self.place):
            folder = self._folder(done)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for number, each in enumerate(tensors):
                save_file({name: tensor.contiguous() for name, tensor in each.items()}, folder / _name(number))
            sync_tree(folder)
            content = {"fingerprint": self.fingerprint, "done": done, "state": dict(state)}
            replace_file(self.directory / LEDGER_FILE, json.dumps(content).encode())
            if self.done:
                shutil.rmtree(self._folder(self.done), ignore_errors=True)
        self.done, self.state = done, dict(state)

    def tensors(self) -> Iterator[dict[str, Tensor]]:
        """The sets of tensors that were kept last, one in memory at a time."""
        folder = self._folder(self.done)
        for number in range(len(list(folder.iterdir()))):
            yield load_file(folder / _name(number))

    def _folder(self, done: int) -> Path:
        return self.directory / f"states-{done}"


def _name(number: int) -> str:
    return f"{number:05d}.safetensors"


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Leaves that differ, by the last part of their names."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*before, *now)):
            yield from _differences(before.get(key), now.get(key), key)
    elif before != now:
        yield f"`{name}` was {_shown(before)} and is {_shown(now)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
