"""Data in shards: every kind of file gives the same samples, in an order that any process can begin anywhere."""

from __future__ import annotations

import base64
import gzip
import io
import itertools
import json
import random
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch import Tensor

from morph.contract.errors import JobError
from morph.data import MicroBatchLoader, data_of
from morph.data.loader import data_facts
from morph.data.order import EpochOrder
from morph.data.shard_order import ShardOrder, _words
from morph.data.streams import Iterated, Jsonl, Mds, Parquet, Rows, Stream, Tar
from morph.elastic.mini_batches import Batch, batches
from morph.preflight.data_check import check_data, reading_warnings
from morph.preflight.mean_loss import loss_warnings
from tests.data.jobs import job_with
from tests.waiting import BOUND_S

NUM_FILES, NUM_SAMPLES = 3, 60
SIZES = [11, 29, 20]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    yield tmp_path / "cache"
    if memory.exists("/data"):
        memory.rm("/data", recursive=True)


def records() -> Iterator[list[dict[str, Any]]]:
    """Return the records of each file, of different lengths."""
    numbers = iter(range(NUM_SAMPLES))
    for size in SIZES:
        yield [{"id": number, "text": "é" * (number % 7)} for number in itertools.islice(numbers, size)]


def write_lines(folder: str, *, pack: bool = False) -> None:
    for number, found in enumerate(records()):
        texts = [json.dumps(record, ensure_ascii=False) for record in found]
        lines = ["", *texts[:3], "\r", *texts[3:]]
        content = "\n".join(lines).encode() + b"\n" * (number % 2)
        write(f"{folder}/{number}.jsonl{'.gz' if pack else ''}", gzip.compress(content) if pack else content)


def write(url: str, content: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, content)


def write_tars(folder: str, *, pack: bool = False) -> None:
    for number, found in enumerate(records()):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz" if pack else "w") as archive:
            for record in found:
                long = "in/a/folder/" * 12 if record["id"] == 7 else ""
                for suffix, content in (("json", json.dumps(record)), ("seg.txt", record["text"])):
                    member = tarfile.TarInfo(f"{long}{record['id']:06d}.{suffix}")
                    member.size = len(content.encode())
                    archive.addfile(member, io.BytesIO(content.encode()))
        write(f"{folder}/{number}.tar{'.gz' if pack else ''}", packed.getvalue())


def write_parquet(folder: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for number, found in enumerate(records()):
        file = io.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(found), file, row_group_size=4)
        write(f"{folder}/{number}.parquet", file.getvalue())


def write_mds(folder: str, *, pack: bool = False, encoding: str = "int") -> None:
    """Write a shard like MDSWriter: a count, the offsets of samples, and each sample after its variable sizes."""
    entries = []
    for number, found in enumerate(records()):
        samples = []
        for record in found:
            text = record["text"].encode()
            samples.append(len(text).to_bytes(4, "little") + record["id"].to_bytes(8, "little") + text)
        bounds = np.cumsum([4 * (len(samples) + 2), *map(len, samples)]).astype("<u4")
        raw = len(samples).to_bytes(4, "little") + bounds.tobytes() + b"".join(samples)
        content, name = (gzip.compress(raw), f"{number}.mds.gz") if pack else (raw, f"{number}.mds")
        write(f"{folder}/{name}", content)
        held = {"basename": name, "bytes": len(content)}
        entries.append({
            "format": "mds", "version": 2, "samples": len(samples), "compression": "gz" if pack else None,
            "column_names": ["id", "text"], "column_encodings": [encoding, "str"], "column_sizes": [8, None],
            "raw_data": {"basename": f"{number}.mds", "bytes": len(raw)}, "zip_data": held if pack else None,
        })  # fmt: skip
    write(f"{folder}/index.json", json.dumps({"version": 2, "shards": entries}).encode())


def of_tar(parts: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(parts["json"])
    assert parts["seg.txt"].decode() == record["text"]
    assert parts["__key__"].endswith(f"{record['id']:06d}")
    return record


KINDS: dict[str, tuple[Callable[[str], None], Callable[[str], Any], Callable[[Any], Any] | None]] = {
    "jsonl": (write_lines, lambda url: Jsonl(f"{url}/*.jsonl", shard_bytes=300), None),
    "jsonl.gz": (lambda url: write_lines(url, pack=True), lambda url: Jsonl(url), None),
    "tar": (write_tars, lambda url: Tar(url, shard_bytes=5000), of_tar),
    "tar.gz": (
        lambda url: write_tars(url, pack=True),
        lambda url: Tar([f"{url}/{n}.tar.gz" for n in range(3)]),
        of_tar,
    ),
    "parquet": (write_parquet, lambda url: Parquet(url, shard_bytes=200), None),
    "mds": (write_mds, Mds, None),
    "mds.gz": (lambda url: write_mds(url, pack=True), Mds, None),
}


@pytest.mark.parametrize("where", ["local", "elsewhere"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_has_the_same_samples(kind: str, where: str, tmp_path: Path) -> None:
    folder = f"{tmp_path}/data" if where == "local" else "memory://data"
    write_kind, source_of, sample = KINDS[kind]
    write_kind(folder)
    source = source_of(folder)
    assert len(source.sizes) > NUM_FILES or "." in kind or kind == "mds", "shards are shorter than files"
    stream = Stream(source, sample)
    assert [stream[index] for index in range(len(stream))] == [record for found in records() for record in found]
    with pytest.raises(IndexError):
        stream[NUM_SAMPLES]


BY_MDS_WRITER = (
    "H4sIAAAAAAACA+3Wz0rDQBAG8EkjYkD0orcKYc85aCq19GLxNaSUtdnYheym5I9YRfBJfAvfS/AFnE1SqGBuXsQv5Ae7y8x32MMyPhENPSJvn+"
    "jtmOjzjOhZLPOsNnah7DJPtL0vxTS8FTaRRSE3Igq3y2ma5bIaxdM4Grnjbrtboa07mPNJl2mlUW2etE1Wqh9V0rTU5k4VblVt1ny001Tqp7bJ"
    "1lkWhfFlFPLvNm2RWReqLHVuuaYtEWleGFnxXpikdKErWa7aENfjEheZNtqVjK8uzieTMUeKB1V0OfHLId/N+x7RzYHHN7T9Xq/7BB5FTSUAwF"
    "9wwlTQPHID+vZ98KNGsz7BgB871wEAAAAAv2fITo+a4cz/YTijdhib9Qp8HtJcJwAAAAAAAPw/X5glszXzHQAA"
)
"""A shard that MDSWriter of mosaicml-streaming 0.13.0 wrote of the columns and rows of the test below, packed."""


def test_arrays_of_mds_keep_type_and_shape(tmp_path: Path) -> None:
    shard = gzip.decompress(base64.b64decode(BY_MDS_WRITER))
    write(f"{tmp_path}/shard.00000.mds", shard)
    columns = {"any": "ndarray", "fixed": "ndarray:float32:2,3", "number": "float32", "typed": "ndarray:int32"}
    described = {
        "format": "mds", "version": 2, "samples": 3, "compression": None, "zip_data": None,
        "column_names": [*columns], "column_encodings": [*columns.values()], "column_sizes": [None, 24, 4, None],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}},
    }  # fmt: skip
    write(f"{tmp_path}/index.json", json.dumps({"version": 2, "shards": [described]}).encode())
    stream = Stream(Mds(str(tmp_path)))
    assert len(stream) == 3
    for size, found in enumerate((stream[index] for index in range(3)), 1):
        row: dict[str, Any] = {
            "any": np.arange(size, dtype=np.float64)[None],
            "typed": np.full((size, 300), size, np.int32),
            "fixed": np.full((2, 3), size, np.float32),
            "number": np.float32(size),
        }
        assert found.keys() == row.keys()
        assert all(found[name].dtype == row[name].dtype and np.array_equal(found[name], row[name]) for name in row)


# ---- the order ----


@pytest.mark.parametrize(("sizes", "window"), [([3, 0, 5, 7, 2], 4), ([900] * 30, 2500), ([500] * 20, 1)])
def test_the_order_of_a_stretch_is_that_of_all_keys_sorted(sizes: list[int], window: int) -> None:
    order = ShardOrder(sizes, window)
    total, starts = sum(sizes), np.cumsum([0, *sizes])
    for epoch in (0, 3):
        found = order(7, epoch)
        row = np.concatenate([np.arange(starts[shard], starts[shard + 1]) for shard in found.row])
        keys = np.arange(total) + (_words(7, (epoch, 1), 0, total) % np.uint64(window)).astype(np.int64)
        assert np.array_equal(np.asarray(found), row[np.argsort(keys, kind="stable")])
        late = np.arange(total - 3, total)
        assert np.array_equal(ShardOrder(sizes, window)(7, epoch)[late], np.asarray(found)[late])
    assert len({tuple(np.asarray(order(seed, epoch))) for seed, epoch in ((7, 0), (7, 1), (8, 0))}) == 3


def test_the_shards_in_use_at_once_are_few() -> None:
    size, num_shards, window = 50, 40, 4
    order = ShardOrder([size] * num_shards, window * size)
    shards = np.asarray(order(0, 0)) // size
    for begin in range(len(shards) - 100):
        assert len(np.unique(shards[begin : begin + 100])) <= window + 3
    assert len(np.unique(shards[1000:1100])) > window - 1, "and samples of them are mixed"


class Counted:
    """A source that records which shards were opened."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.opened = sizes, list[int]()
        self._starts = [0, *itertools.accumulate(sizes)]

    def open(self, shard: int) -> range:
        self.opened.append(shard)
        return range(self._starts[shard], self._starts[shard + 1])


def test_in_an_epoch_every_shard_is_opened_once() -> None:
    source = Counted([random.Random(0).randrange(5, 50) for _ in range(60)])
    stream = Stream(source, window=3)
    found = [stream[int(index)] for index in np.asarray(stream.sample_order(2, 0))]
    assert sorted(found) == list(range(len(stream)))
    assert sorted(source.opened) == list(range(60))


def tensors(record: dict[str, Any]) -> dict[str, Tensor]:
    return {"id": torch.tensor(record["id"]), "draw": torch.rand(())}


def loaded(make: Callable[[], Stream], steps: range) -> list[list[float]]:
    loader = MicroBatchLoader(make(), seed=5, batch_size=8, micro_batch_size=4)
    batches = [loader.load(step, micro_batch, ["id", "draw"]) for step in steps for micro_batch in range(2)]
    return [[*batch["id"].tolist(), *batch["draw"].tolist()] for batch in batches]


def test_a_reader_that_begins_anywhere_loads_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_lines("memory://data")

    def make() -> Stream:
        return Stream(Jsonl("memory://data", shard_bytes=200), tensors, window=2)

    whole = loaded(make, range(20))
    for epoch in range(2):  # of 7.5 steps
        ids = [int(number) for row in whole for number in row[:4]][epoch * NUM_SAMPLES : (epoch + 1) * NUM_SAMPLES]
        assert sorted(ids) == list(range(NUM_SAMPLES))
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path / "another machine"))
    assert loaded(make, range(9, 13)) == whole[18:26]


def test_the_next_shard_is_fetched_during_computation() -> None:
    class Fetched(Counted):
        def __init__(self, sizes: list[int]) -> None:
            super().__init__(sizes)
            self.fetched = list[int]()

        def prepare(self, shard: int) -> None:
            self.fetched.append(shard)

    stream = Stream(source := Fetched([10] * 8), window=1)
    row = stream.sample_order(1, 0).row.tolist()
    for place in (2, 2, 1, 3):
        stream.expect_samples(1, [(0, 10 * row[place])])
        if stream._preparing is not None:
            stream._preparing.join(BOUND_S)
    assert source.fetched == [row[3], row[4], row[2], row[5]]


# ---- the index, and copies ----


def test_an_index_is_made_once_and_anew_when_files_change(monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines("memory://data/lines")
    scanned = []
    scan = Jsonl._scan
    monkeypatch.setattr(Jsonl, "_scan", lambda self, file: scanned.append(file.name) or scan(self, file))

    def sizes() -> list[int]:
        return Jsonl("memory://data/lines", index="memory://data/index.json").sizes

    first = sizes()
    assert (sizes(), len(scanned)) == (first, NUM_FILES)
    write("memory://data/index.json", b'{"shards": [[0, 0, 10]]}')
    assert (sizes(), len(scanned)) == (first, 2 * NUM_FILES)
    write("memory://data/lines/3.jsonl", b'{"id": 60}\n')
    assert (sizes(), len(scanned)) == ([*first, 1], 3 * NUM_FILES + 1)


def test_without_a_place_for_it_the_index_is_kept_for_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_lines(f"{tmp_path}/data")
    first = Jsonl(f"{tmp_path}/data").sizes
    monkeypatch.setattr(Jsonl, "_scan", lambda self, file: pytest.fail("read again"))
    assert Jsonl(f"{tmp_path}/data").sizes == first


def test_copies_are_shared_and_bounded(own_cache: Path) -> None:
    write_lines("memory://data", pack=True)
    one, other = (Stream(Jsonl("memory://data", cache_bytes=1500)) for _ in range(2))
    fetched = []
    for stream in (one, other):
        fetch = stream.source._fetch
        stream.source._fetch = lambda shard, into, fetch=fetch: fetched.append(shard) or fetch(shard, into)
    assert one[0] == other[0]
    assert len(fetched) == 1
    assert [one[index]["id"] for index in (15, 45, 0)] == [15, 45, 0], "what is open stays so when its copy is removed"
    assert sum(path.stat().st_size for path in (own_cache / "shards").iterdir()) <= 1500


# ---- streams that can only be read from their beginning ----


class Passing:
    """Numbers from 0 on, with a state; a restored state is wrong by ``off``. Counts its reads."""

    num_read = 0

    def __init__(self, length: int = 100, off: int = 0) -> None:
        self._length, self._at, self._off = length, 0, off

    def __iter__(self) -> Iterator[int]:
        while self._at < self._length:
            self._at += 1
            Passing.num_read += 1
            yield self._at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"] + self._off


def passing(make: Callable[[], Any], bookmarks: str | None = "memory://data/marks") -> Stream:
    Passing.num_read = 0
    return Stream(Iterated(make, 95, block_size=10, bookmarks=bookmarks), window=1)


def test_a_stream_without_shards_is_read_once_an_epoch() -> None:
    stream = passing(Passing, None)
    order = EpochOrder(stream, 3, 10)
    places = [place for step in range(19) for place in order.mini_batch(step)]
    found = [stream[index] for _, index in places]
    assert sorted(found[:95]) == sorted(found[95:]) == list(range(95))
    assert found[:95] != found[95:]
    assert found[:95] != sorted(found[:95])
    assert Passing.num_read == 2 * 95


@pytest.mark.parametrize(("off", "num_read"), [(0, 5), (1, 5 + 95)])
def test_a_state_is_used_where_it_leads_back_to_the_same_samples(off: int, num_read: int) -> None:
    stream = passing(Passing)
    assert [stream[index] for index in range(95)] == list(range(95))
    stream = passing(lambda: Passing(off=off))
    assert (stream[93], Passing.num_read) == (93, num_read), "the last block, or also all from the beginning"
    assert [stream[index] for index in (20, 94, 5)] == [20, 94, 5]


def test_an_iterable_that_ends_too_soon_is_refused() -> None:
    stream = passing(lambda: Passing(42))
    with pytest.raises(JobError, match=r"Iterated: num_samples: is too large \(got 95\); allowed: up to 42, where"):
        stream[94]


def test_streams_of_datasets_are_read_by_number_and_resumed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets, whose streams are read")
    write_lines(f"{tmp_path}/lines")

    def load(*, streaming: bool) -> Any:
        files, cache = f"{tmp_path}/lines/*.jsonl", str(tmp_path / "datasets")
        return datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache, streaming=streaming)

    rows = Stream(Rows(load(streaming=False), 25))
    assert [rows[index]["id"] for index in (0, 31, 59)] == [0, 31, 59]
    for shuffled in (False, True):

        def make(shuffled: bool = shuffled) -> Any:
            stream = load(streaming=True)
            return stream.shuffle(seed=1, buffer_size=20) if shuffled else stream

        url, whole = f"memory://data/{shuffled}", [row["id"] for row in make()]
        for indices in (range(NUM_SAMPLES), (51, 57, 3)):
            stream = Stream(Iterated(make, NUM_SAMPLES, block_size=10, bookmarks=url))
            assert [stream[index]["id"] for index in indices] == [whole[index] for index in indices]


class OfKnownLength(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Samples that draw while they are iterated."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"x": torch.rand(()), "id": torch.tensor(index)} for index in range(20))


def test_an_iterable_data_set_of_known_length_is_dealt_with_a_warning() -> None:
    job = job_with(OfKnownLength)
    stream = data_of(job)
    assert [int(stream[index]["id"]) for index in range(20)] == list(range(20))
    assert data_facts(job) == data_facts(job_with(OfKnownLength)), "draws belong to a sample"
    assert [text.partition(":")[0] for text in reading_warnings(job)] == ["dataset is a stream without shards"]
    assert reading_warnings(job_with(lambda: Stream(Counted([3])))) == ()


def test_checks_before_a_run_read_the_first_shard_alone() -> None:
    sources = []

    def make() -> Stream:
        sources.append(Counted([5] * 30))
        return Stream(sources[-1], lambda number: {"x": torch.full((3,), float(number))})

    job = job_with(make)
    check_data(job)
    data_facts(job)
    assert len(loss_warnings(job)) == 1, "of a sum, which is tried on samples at hand"
    assert {shard for source in sources for shard in source.opened} == {0}


def test_elastic_loops_take_streams() -> None:
    source = Counted([8] * 8)
    mini_batches = batches(Stream(source, window=1), global_batch=16, seed=3, share_size=4)
    shares = [Batch(mini_batches, step).share(index) for step in range(8) for index in range(4)]
    found = torch.cat(shares).tolist()
    assert sorted(found[:64]) == sorted(found[64:]) == list(range(64))
    assert len(source.opened) == 16, "each shard once an epoch"
    assert len(batches(OfKnownLength(), global_batch=4, seed=0)) == 5


# ---- mistakes ----


def cut_off(folder: str, num_bytes: int) -> None:
    write_tars(folder)
    fs, path = fsspec.core.url_to_fs(f"{folder}/1.tar")
    write(f"{folder}/1.tar", fs.cat_file(path)[:num_bytes])


@pytest.mark.parametrize(
    ("write_kind", "make", "problem"),
    [
        (None, Jsonl, r"Jsonl: urls: names no file \(got 'memory://data'\); allowed: files such as part-0000.jsonl"),
        (None, lambda url: Jsonl([]), r"Jsonl: urls: names no file; allowed: at least one file, folder or pattern"),
        (None, lambda url: Jsonl(url, shard_bytes=0), r"shard_bytes: is not right \(got 0\); allowed: a whole number"),
        (write_lines, lambda url: Stream(Jsonl(url), window=-1), r"Stream: window: is not right \(got -1\)"),
        (
            lambda url: write(f"{url}/1.jsonl", b'{"id": 1}\n{"id": \n'),
            lambda url: Stream(Jsonl(url))[1],
            r"/data/1.jsonl: byte 10: is not JSON: Expecting value",
        ),
        (lambda url: write(f"{url}/1.jsonl", b"\n"), lambda url: Stream(Jsonl(url)), r"Stream: source: is empty"),
        (write_lines, lambda url: Tar(f"{url}/*.jsonl"), r"/data/0.jsonl: is not a tar archive: "),
        (
            lambda url: cut_off(url, 1124),
            Tar,
            r"/data/1.tar: ends within a sample \(got 1124\); allowed: blocks of 512",
        ),
        (lambda url: cut_off(url, 512), Tar, r"/data/1.tar: ends within a sample \(got 512\); allowed: at least 5\d\d"),
        (
            lambda url: write_mds(url, encoding="pkl"),
            Mds,
            r"/data/index.json: id: cannot be decoded \(got 'pkl'\); allowed: bytes, int, ",
        ),
        (
            lambda url: write(f"{url}/index.json", b'{"shards": [{}]}'),
            Mds,
            r"/data/index.json: is not an index of MDS shards: KeyError: ",
        ),
        (None, lambda url: Rows(range(4), 0), r"Rows: shard_size: is not right \(got 0\); allowed: a whole number"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(
    write_kind: Callable[[str], None] | None, make: Callable[[str], Any], problem: str
) -> None:
    if write_kind is not None:
        write_kind("memory://data")
    with pytest.raises(JobError, match=problem):
        make("memory://data")


def test_parquet_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(JobError, match=r"Parquet: urls: needs pyarrow; allowed: pip install"):
        Parquet("memory://data")
