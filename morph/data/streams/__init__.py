"""Data in shards: a source says where samples are, and ``Stream`` makes a data set of it (docs/training.md)."""

from __future__ import annotations

from morph.data.streams.kinds import Jsonl, Mds, Parquet, Tar
from morph.data.streams.stream import Iterated, Rows, Source, Stream, reading_warning

__all__ = ["Iterated", "Jsonl", "Mds", "Parquet", "Rows", "Source", "Stream", "Tar", "reading_warning"]
