"""The GPT-2 of gpt2_stdlib.py learns lines of text out of packed shards, with a loss by token.

``python configs/jobs/gpt2_shards.py`` writes the shards, from the standard library; ``TEXT_SHARDS`` says where they
are: a folder, or a URL such as s3://bucket/text, from which workers copy them as they need them.
"""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpt2_stdlib import LENGTH, model, optimizer
from torch import Tensor, nn

from morph import Job, Loss
from morph.data.streams import Jsonl, Stream
from morph.losses import cross_entropy

SHARDS = os.environ.get("TEXT_SHARDS", f"{tempfile.gettempdir()}/morph-text-shards")
NUM_SHARDS = 16
IGNORED = -100


def tokens(record: dict[str, Any]) -> dict[str, Tensor]:
    """Return ``input_ids`` and ``labels``, both [length], of one line: its bytes, and what makes them long enough."""
    text = torch.tensor(list(record["text"].encode()[:LENGTH]))
    rest = LENGTH - len(text)
    ids, labels = (nn.functional.pad(text, (0, rest), value=value) for value in (0, IGNORED))
    return {"input_ids": ids, "labels": labels}


def dataset() -> Stream:
    """Return the lines, shuffled among eight shards at a time."""
    return Stream(Jsonl(f"{SHARDS}/*.jsonl.gz", index=f"{SHARDS}/index.json"), tokens)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Return the cross entropy of the next byte, over the bytes of all lines."""
    logits = model(input_ids=batch["input_ids"]).logits
    return cross_entropy(logits[:, :-1], batch["labels"][:, 1:], ignore_index=IGNORED)


def write_shards(folder: Path) -> None:
    """Write every line of the top-level files of the standard library, as JSON, in packed files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if len(line) > 1]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(NUM_SHARDS):
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines[number::NUM_SHARDS])
        (folder / f"{number:04d}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


job = Job(
    name="gpt2-shards",
    model=model,
    loss=loss,
    dataset=dataset,
    optimizer=optimizer,
    batch_size=32,
    micro_batch_size=4,
    num_sections=8,
    data_workers=1,
)

if __name__ == "__main__":
    write_shards(Path(SHARDS))
    print(f"{NUM_SHARDS} shards are in {SHARDS}")
