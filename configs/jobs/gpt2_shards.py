"""A GPT-2 learns lines of text out of packed shards, several in a sample, with a loss by token.

``python configs/jobs/gpt2_shards.py`` writes the shards, from the standard library; ``TEXT_SHARDS`` says where they
are: a folder, or a URL such as s3://bucket/text, from which workers copy them as they need them.
configs/runs/gpt2_shards.yaml runs the job with trackers.
"""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt2_stdlib import LENGTH, model, optimizer
from torch import Tensor, nn

from morph import Job, Loss
from morph.data import Packed
from morph.data.packing import packs
from morph.data.streams import Jsonl, Stream
from morph.losses import cross_entropy

SHARDS = os.environ.get("TEXT_SHARDS", f"{tempfile.gettempdir()}/morph-text-shards")
NUM_SHARDS = 16


def sample(record: dict[str, Any]) -> dict[str, Tensor]:
    """Return ``input_ids``, ``labels`` and ``position_ids``, each [length], of the lines of one record."""
    lines = [torch.tensor(list(line.encode()[:LENGTH])) for line in record["lines"]]
    documents = [{"input_ids": line, "labels": line} for line in lines]
    return Packed(documents, LENGTH, list(map(len, lines)))[0]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Return the cross entropy of the next byte of each line, over the bytes of all lines."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    return cross_entropy(logits[:, :-1], batch["labels"][:, 1:])


def write_shards(folder: Path, num_files: int | None = None) -> None:
    """Write the lines of top-level files of the standard library, as records that each fill a sample."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if len(line) > 1]
    filled = packs([min(LENGTH, len(line.encode())) for line in lines], LENGTH)
    records = [json.dumps({"lines": [lines[number] for number in pack]}) + "\n" for pack in filled]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(NUM_SHARDS):
        text = "".join(records[number::NUM_SHARDS])
        (folder / f"{number:04d}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def job(shards: str = SHARDS, num_layers: int = 8, width: int = 128, dropout: float = 0.1, **more: Any) -> Job:
    """Return the job; its samples are shuffled among eight shards at a time."""
    settings = {"batch_size": 32, "micro_batch_size": 4, "num_sections": 8, "data_workers": 1, **more}
    return Job(
        name="gpt2-shards",
        model=partial(model, num_layers, width, dropout),
        loss=loss,
        dataset=lambda: Stream(Jsonl(f"{shards}/*.jsonl.gz", index=f"{shards}/index.json"), sample),
        optimizer=optimizer,
        **settings,
    )


if __name__ == "__main__":
    write_shards(Path(SHARDS))
    print(f"{NUM_SHARDS} shards are in {SHARDS}")
