"""Nothing that comes over Ray is unpickled in the manager, whoever sent it.

Ray hands what an actor returns or raises to whoever asks as a pickle, and the sender chooses what it does when it is
read. A VM can be anybody's: so this process takes bytes alone, which Ray carries as they are, and reads them as JSON.
"""

from __future__ import annotations

from typing import Any, NoReturn

import ray
from ray._private import serialization
from ray._private import worker as ray_worker
from ray.core.generated import common_pb2
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    OwnerDiedError,
    RayError,
    WorkerCrashedError,
)

from morph.contract.errors import ClusterError

RAW = b"RAW"
CHECK_TIMEOUT_S = 30.0


class RefusedAnswer(RayError):
    """Something else than bytes came, or an exception of the other end, which is none of this process's to read."""


class _PlainContext(serialization.SerializationContext):
    """Reads bytes, and by its number what went wrong: nothing of what the other end wrote beside that."""

    def _deserialize_object(self, data: Any, metadata: Any, *_: Any) -> Any:
        kind = bytes(metadata or b"").split(b",")[0]
        if kind == RAW:
            return b"" if data is None else data.to_pybytes()
        return _error(int(kind)) if kind.isdigit() else RefusedAnswer(f"of kind {kind[:20]!r}")


def _error(number: int) -> RayError:
    kinds: Any = vars(common_pb2)["ErrorType"]  # made without types
    name = kinds.Name(number) if number in kinds.values() else str(number)
    if name == "ACTOR_UNAVAILABLE":
        return ActorUnavailableError("it cannot be reached", None)
    if name == "OWNER_DIED":
        return OwnerDiedError("", None, "")
    known: dict[str, Any] = {"ACTOR_DIED": ActorDiedError, "WORKER_DIED": WorkerCrashedError}
    if name in known:
        error: RayError = known[name]()
        return error
    return RefusedAnswer("it raised an exception" if name == "TASK_EXECUTION_EXCEPTION" else name)


class _Bomb:
    """Shows that it was unpickled."""

    went_off = False

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _go_off, ()


def _go_off() -> None:
    _Bomb.went_off = True


def believe_no_names() -> None:
    """Before this process connects: what the cluster's table names to be imported and called is not."""

    def refuse(name: str) -> NoReturn:
        raise ClusterError(f"Ray's table asks this process to import {name!r}")

    vars(ray_worker)["_import_from_string"] = refuse


def take_bytes_alone(actor_class: type) -> None:
    """Once this process is connected: read nothing else; handles of actors found by name are of ``actor_class``.

    Raises:
        ClusterError: this version of Ray would unpickle all the same.
    """
    ours: Any = ray_worker.global_worker  # whose types are few
    make_context: Any = _PlainContext
    context = ours.serialization_context_map[ours.current_job_id] = make_context(ours)
    modified = vars(ray.actor)["_modify_class"](actor_class)
    ours.function_actor_manager.load_actor_class = lambda _job, _descriptor: modified  # Ray's own would unpickle one
    vars(ours)["_get_rdt_ids"] = lambda _objects, _references: []
    taken: Any = ray.put(b"bytes").future()
    bomb: Any = ray.put(_Bomb()).future()
    is_plain = taken.result(CHECK_TIMEOUT_S) == b"bytes" and isinstance(bomb.exception(CHECK_TIMEOUT_S), RefusedAnswer)
    if not is_plain or _Bomb.went_off or ours.get_serialization_context() is not context:
        raise ClusterError("Ray of this version unpickles what workers send: Morph does not go on with it")
