"""Storage that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest

from tests.checkpoint.fake_blobs import BlobService, blob_service


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlobService]:
    """Azure's blobs, as the environment names their account."""
    adlfs = pytest.importorskip("adlfs")
    with blob_service() as service:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", service.connection_string)
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        yield service
        adlfs.AzureBlobFileSystem.clear_instance_cache()
    assert fsspec.get_filesystem_class("abfs") is adlfs.AzureBlobFileSystem
