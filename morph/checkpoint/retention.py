"""Which versions stay and which go, decided apart from the deleting."""

from __future__ import annotations

from collections.abc import Iterable

from morph.checkpoint.stored import StoredVersion, delete_version, stored_versions
from morph.contract.rules import CheckpointRules


def superfluous(versions: Iterable[StoredVersion], rules: CheckpointRules) -> tuple[int, ...]:
    """Return the versions that go, ascending. Nothing goes before ``keep_newest`` newer ones are complete.

    Versions that a user keeps stay, complete or not, and do not count among the newest: keeping one costs no other its
    place. The first complete version of each span of ``keep_every_steps`` steps stays, whoever keeps it. What is not
    complete, or was set aside, goes with what is older than the newest; what is newer may still be on its way.
    """
    found = sorted(versions, key=lambda stored: stored.version)
    complete = [stored.version for stored in found if stored.complete]
    newest = [stored.version for stored in found if stored.complete and not stored.kept][-rules.keep_newest :]
    if len(newest) < rules.keep_newest:
        return ()
    first_of_span: dict[int, int] = {}
    if rules.keep_every_steps is not None:
        for version in complete:
            first_of_span.setdefault(version // rules.keep_every_steps, version)
    stay = {stored.version for stored in found if stored.kept} | set(first_of_span.values())
    return tuple(stored.version for stored in found if stored.version < newest[0] and stored.version not in stay)


def delete_superfluous(url: str, rules: CheckpointRules) -> None:
    """Delete what goes, the oldest first.

    Raises:
        CheckpointError: the storage cannot be read.
        Exception: it does not delete, of whatever kind this storage's errors are.
    """
    for version in superfluous(stored_versions(url), rules):
        delete_version(url, version)
