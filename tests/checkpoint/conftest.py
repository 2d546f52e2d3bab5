"""Storage that these tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from tests.checkpoint.fake_blobs import CONTAINER, BlobService, blob_service
from tests.checkpoint.fake_buckets import BucketService, bucket_service


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlobService]:
    """Return Azure's blobs, with their account in the environment."""
    adlfs = pytest.importorskip("adlfs")
    with blob_service() as service:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", service.connection_string)
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        yield service
        adlfs.AzureBlobFileSystem.clear_instance_cache()
    assert fsspec.get_filesystem_class("abfs") is adlfs.AzureBlobFileSystem


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketService]:
    """Return S3's buckets, with credentials in the environment."""
    with bucket_service() as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        filesystem = fsspec.get_filesystem_class("s3")
        filesystem.clear_instance_cache()
        yield service
        filesystem.clear_instance_cache()


@pytest.fixture(params=["path", "file", "memory", "blobs", "buckets"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a checkpoint directory that does not exist yet, on each kind of storage."""
    if request.param == "buckets":
        bucket: str = request.getfixturevalue("buckets").bucket
        return f"s3://{bucket}/runs/checkpoints"
    if request.param == "blobs":
        request.getfixturevalue("blobs")
    return {
        "blobs": f"abfs://{CONTAINER}/runs/{uuid4().hex}/checkpoints",
        "path": str(tmp_path / "checkpoints"),
        "file": f"file://{tmp_path}/checkpoints",
        "memory": f"memory://run-{uuid4().hex}/checkpoints",
    }[request.param]
