"""The base of the contract's values, and functions that read one from a JSON file with errors for a user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from morph.contract.errors import InputError, printable, problem_text
from morph.contract.kinds import Kind, kind_in, mistaken

Shown = Annotated[str, AfterValidator(printable)]
"""A text that is shown to a user and may come from another machine or from a file that others can write."""


class Value(BaseModel):
    """A frozen value; unknown fields are refused, and NaN or infinity is not a number here."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings")

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:  # type: ignore[override]
        """Make an instance of values that were checked before, faster than pydantic does. Never use it for input."""
        defaults, factories, given = _given(cls, *values)
        fields = {**defaults, **values}
        for name, factory in factories:
            fields[name] = factory()
        return _made(cls, fields, given if _fields_set is None else _fields_set)

    @classmethod
    def each(cls, name: str, values: Iterable[Any], **shared: Any) -> list[Self]:
        """Make many instances of checked values that differ in one field, even faster. Never use it for input."""
        like = cls.model_construct(**{name: None}, **shared)
        fields, given = like.__dict__, like.__pydantic_fields_set__
        return [_made(cls, {**fields, name: value}, given) for value in values]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced, unchecked and without derived values (``cached_property``)."""
        if deep:
            return super().model_copy(update=update, deep=True)
        update, fields = update or {}, {**self.__dict__}
        names = type(self).__pydantic_fields__
        if len(fields) > len(names):
            fields = {name: fields[name] for name in names}
        fields.update(update)
        given = self.__pydantic_fields_set__
        return _made(type(self), fields, given if given.issuperset(update) else given | update.keys())


ValueT = TypeVar("ValueT", bound=Value)
_put_fields, _put_given, _put_extra, _put_private = (
    BaseModel.__dict__[slot].__set__
    for slot in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


def _made(kind: type[ValueT], fields: dict[str, Any], given: set[str]) -> ValueT:
    value = object.__new__(kind)
    _put_fields(value, fields)
    _put_given(value, given)
    _put_extra(value, None)
    _put_private(value, None)
    return value


@cache
def _given(kind: type[Value], *names: str) -> tuple[dict[str, Any], Sequence[tuple[str, Callable[[], Any]]], set[str]]:
    """Return every field in order with its default; the factories of other defaults; and the names as a set."""
    fields, given = kind.model_fields, set(names)
    lacking = sorted(name for name, field in fields.items() if field.is_required() and name not in given)
    if lacking:
        raise TypeError(f"{kind.__name__} lacks {', '.join(lacking)}")
    made = [(name, field.default_factory) for name, field in fields.items() if name not in given]
    factories = [(name, factory) for name, factory in made if factory is not None]
    return {name: field.default for name, field in fields.items()}, factories, given  # type: ignore[return-value]


def first_problem(error: ValidationError) -> tuple[str, str, object]:
    """Return (dotted field, problem, offending value) of a validation error's first entry."""
    entry = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in entry["loc"])
    return field, problem_text(entry["msg"]), entry["input"]


def read_text(path: Path, error_type: type[InputError], encoding: str = "utf-8", wanted: Kind | None = None) -> str:
    """Read a text file; ends of lines become ``\\n``. ``wanted``: what the file should be, for the error."""
    allowed = None if wanted is None else wanted.wanted
    try:
        return path.read_text(encoding=encoding)
    except OSError as error:
        problem = mistaken(path, f"cannot be read: {error.strerror}")
        raise error_type(problem, source=str(path), allowed=allowed) from error
    except UnicodeDecodeError as error:
        raise error_type("is not UTF-8 text", source=str(path), allowed=allowed) from error


def read_json(path: Path, value_type: type[ValueT], error_type: type[InputError], wanted: Kind | None = None) -> ValueT:
    """Read one contract value from a JSON file. ``wanted``: what the file should be, for errors about another kind."""
    text = read_text(path, error_type, wanted=wanted)
    try:
        return value_type.model_validate_json(text)
    except ValidationError as error:
        field, problem, value = first_problem(error)
        kind = kind_in(text) if wanted is not None else None
        if error.errors(include_url=False)[0]["type"] == "json_invalid":
            problem, kind = "is not JSON", None
        if wanted is not None and kind is not wanted:
            problem, field = mistaken(path, problem), field if kind is None else ""
        shown = (
            value if field and isinstance(value, str | int | float | bool) else None
        )  # otherwise the value is the whole text
        allowed = wanted.wanted if wanted is not None and kind is not wanted else None
        raise error_type(problem, source=str(path), field=field or None, value=shown, allowed=allowed) from error
