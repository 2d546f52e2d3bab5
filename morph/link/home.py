"""The address at which a worker calls the manager."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from morph.contract.base import Value


class Home(Value):
    """The address at which the manager listens to one worker; ``secret`` is a credential for this worker only."""

    model_config = ConfigDict(hide_input_in_errors=True)

    worker: str
    host: str
    port: int = Field(ge=1, le=65535)
    secret: str = Field(repr=False)
