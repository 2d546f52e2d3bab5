"""Base of the contract's values, and reading one from a JSON file with errors a user can act on."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from morph.contract.errors import InputError


class Value(BaseModel):
    """A frozen value; unknown fields are refused, and NaN or infinity is not a number here."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings")


ValueT = TypeVar("ValueT", bound=Value)


def first_problem(error: ValidationError) -> tuple[str, str, object]:
    """Return (dotted field, what is wrong, offending value) of a validation error's first entry."""
    entry = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in entry["loc"])
    return field, entry["msg"].removeprefix("Value error, "), entry["input"]


def read_json(path: Path, value_type: type[ValueT], error_type: type[InputError]) -> ValueT:
    """Read one contract value from a JSON file.

    Raises:
        InputError: of ``error_type``, when the file is missing, is not JSON, or breaks the schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise error_type(f"cannot be read: {error.strerror}", source=str(path)) from error
    except UnicodeDecodeError as error:
        raise error_type("is not UTF-8 text", source=str(path)) from error
    try:
        return value_type.model_validate_json(text)
    except ValidationError as error:
        field, problem, value = first_problem(error)
        shown = value if field and isinstance(value, str | int | float | bool) else None  # else it is the whole text
        raise error_type(problem, source=str(path), field=field or None, value=shown) from error
