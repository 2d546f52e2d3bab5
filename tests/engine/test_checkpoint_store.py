"""The newest undamaged checkpoint is found while the live loop runs; the result is an event."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.controller.state.events import CheckpointFound, CheckpointNotFound, Event
from manager.engine.loop.checkpoint_store import CheckpointStore
from manager.engine.loop.event_queue import EventQueue
from manager.engine.loop.lease import Lease, this_process
from manager.journal.records import Fact
from morph.checkpoint.manifest import complete_versions
from morph.checkpoint.retention import best_version
from morph.contract.errors import CheckpointsTaken
from morph.contract.evaluation import Best
from morph.contract.rules import CheckpointRules
from tests.checkpoint.test_manifest import _flipped, save


def found(url: str, at_most: int | None = None) -> Event:
    events = EventQueue()
    store = CheckpointStore(url, CheckpointRules(), events)
    store.find(at_most)
    stamped = events.get(100.0)
    store.close()
    assert isinstance(stamped.item, CheckpointFound | CheckpointNotFound)
    return stamped.item


def test_a_checkpoint_with_a_flipped_bit_is_skipped_and_set_aside(tmp_path: Path) -> None:
    save(str(tmp_path), 2, 4)
    _flipped(str(tmp_path), 4)
    event = found(str(tmp_path))
    assert isinstance(event, CheckpointFound)
    assert event.manifest.version == 2
    (told,) = event.passed_over
    assert "differs from its manifest" in told
    assert complete_versions(str(tmp_path)) == (2,)


def test_a_place_that_another_manager_has_taken_is_left_as_it_is(tmp_path: Path) -> None:
    url, events = str(tmp_path), EventQueue()
    save(url, 2)
    ours, other = (Lease(url, this_process(run, tmp_path / run)) for run in ("one", "two"))
    ours.take()
    other.take(by_force=True)
    store = CheckpointStore(url, CheckpointRules(), events, ours)
    store.mark(Best(version=2, metric="loss", value=1.0))
    stamped = events.get(100.0)
    store.close()
    assert isinstance(stamped.item, Fact)
    assert "were taken over by the run in" in stamped.item.detail
    assert best_version(url) is None
    with pytest.raises(CheckpointsTaken):
        store.check()
    ours.close()
    other.close()


def test_newer_versions_than_a_bad_step_goes_back_to_are_left_alone(tmp_path: Path) -> None:
    save(str(tmp_path), 2, 4, 6)
    event = found(str(tmp_path), at_most=5)
    assert isinstance(event, CheckpointFound)
    assert (event.manifest.version, event.passed_over) == (4, ())
    event = found(str(tmp_path), at_most=1)
    assert isinstance(event, CheckpointNotFound)
    assert (event.none, event.damaged) == (True, False)
    assert complete_versions(str(tmp_path)) == (2, 4, 6)


def test_storage_without_an_undamaged_version_is_reported_as_damage(tmp_path: Path) -> None:
    save(str(tmp_path), 2)
    _flipped(str(tmp_path), 2)
    event = found(str(tmp_path))
    assert isinstance(event, CheckpointNotFound)
    assert event.damaged


@pytest.mark.parametrize("url", ["{}/gone", "nothing://there"])
def test_storage_that_shows_nothing_or_fails_is_not_damage(tmp_path: Path, url: str) -> None:
    event = found(url.format(tmp_path))
    assert isinstance(event, CheckpointNotFound)
    assert not event.damaged
