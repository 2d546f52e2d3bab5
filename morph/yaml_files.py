"""Reads cluster and job files (YAML) into the contract's values, with errors that help a user."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from morph.contract.base import read_text
from morph.contract.errors import ConfigError, problem_text
from morph.contract.kinds import Kind, kind_in, kind_of, mistaken

if TYPE_CHECKING:
    import yaml

    from morph.contract.base import Value
    from morph.contract.cluster import ClusterConfig, JobFile

ValueT = TypeVar("ValueT", bound="Value")
SET = "--set"


_BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
_NUMBERS = {
    "int": r"[-+]?([0-9][0-9_]*|0o[0-7_]+|0x[0-9a-fA-F_]+)",
    "float": r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
"""Numbers as people write them: those of YAML 1.2, and Python's underscores. In YAML 1.1, which PyYAML reads, ``1e-3``
is text, ``010`` is 8 and ``1:30`` is 90."""


def load_cluster(path: Path, settings: Sequence[str] = ()) -> ClusterConfig:
    """Read a cluster file; an empty one gives every default. ``settings``: see ``load_yaml``."""
    from morph.contract.cluster import ClusterConfig

    return load_yaml(path, ClusterConfig, settings)


def load_job_file(path: Path, settings: Sequence[str] = ()) -> JobFile:
    """Read a job file. ``settings``: see ``load_yaml``."""
    from morph.contract.cluster import JobFile

    return load_yaml(path, JobFile, settings)


def load_config(path: Path) -> ClusterConfig:
    """Read either kind of file: a file with ``job`` is a job file."""
    data = read_yaml(path)
    return load_job_file(path) if isinstance(data, dict) and "job" in data else load_cluster(path)


def _check_kind(data: Any, wanted: Kind | None, fields: Collection[str], path: Path) -> None:
    """Refuse a file of another kind, or one that is not a mapping."""
    kind = kind_of(data) if isinstance(data, dict) else None
    is_other = kind is not wanted and (wanted is not None or not set(data) & set(fields)) if kind else False
    if is_other or not isinstance(data, dict):
        problem = f"is {kind.what}" if kind else mistaken(path, "is not a mapping of keys to values")
        what = wanted.wanted if wanted else "a file"
        raise ConfigError(problem, source=str(path), allowed=f"{what}; its keys are {', '.join(fields)}")


def load_yaml(path: Path, value_type: type[ValueT], settings: Sequence[str] = ()) -> ValueT:
    """Read a YAML file into a value of the contract.

    ``settings``: ``KEY=VALUE`` each, from ``--set``; they replace or complete the values in the file. Raises
    ConfigError if the file cannot be read or is not YAML, has unknown or repeated keys, or values of a wrong type or
    out of range. The error names file, dotted field, value and what is allowed.
    """
    wanted = kind_of(value_type.model_fields)
    data = read_yaml(path, wanted)
    _check_kind(data, wanted, value_type.model_fields, path)
    return _validated(data, value_type, str(path), settings)


def read_settings(settings: Sequence[str], value_type: type[ValueT]) -> ValueT:
    """Read ``KEY=VALUE`` of ``--set`` into a value of the contract."""
    return _validated({}, value_type, SET, settings)


def _validated(data: Any, value_type: type[ValueT], source: str, settings: Sequence[str]) -> ValueT:
    from pydantic import ValidationError

    from morph.contract.cluster import market_entry_points

    given = _assign(settings, data)
    try:
        # Through JSON, so that strict types still accept a mapping for a section.
        return value_type.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        entry = error.errors(include_url=False)[0]
        parts = [part for part in entry["loc"] if isinstance(part, str)]
        unknown, value = entry["type"] == "extra_forbidden", entry["input"]
        schema = value_type.model_json_schema()
        _, node = _walk(parts[:-1] if unknown else parts, schema)
        allowed = None if node is None else _in_words(_resolved(node, schema))
        field, problem = ".".join(_walk(parts, schema)[0]) or None, problem_text(entry["msg"])
        if entry["type"] == "union_tag_invalid":  # pydantic names the section, but describes the kinds in its own words
            field, value = f"{field}.kind", entry["ctx"]["tag"]
            tags = [tag.strip().strip("'") for tag in entry["ctx"]["expected_tags"].split(",")]
            allowed = " or ".join([*(tag for tag in tags if " " not in tag), *market_entry_points()])
        raise ConfigError(
            "unknown key" if unknown else "no such kind" if "tag" in entry.get("ctx", {}) else problem,
            source=None if field in given else source,
            field=f"{SET} {field}" if field in given else field,
            value=value if isinstance(value, str | int | float) else None,
            allowed=allowed,
        ) from error


def _assign(settings: Sequence[str], data: Any) -> set[str]:
    """Put each ``KEY=VALUE`` into plain values, where KEY's dots lead; returns the keys."""
    given: set[str] = set()
    for text in settings:
        key, equals, written = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError("is not a setting", field=SET, value=text, allowed="KEY=VALUE: policy.redundancy=state")
        if key in given:
            raise ConfigError("is set twice", field=f"{SET} {key}", value=written, allowed="each key once")
        given.add(key)
        *sections, last = key.split(".")
        here = data
        for section in sections:
            here = here.setdefault(section, {}) if isinstance(here, dict) else None
        if not isinstance(here, dict):
            raise ConfigError("is in no section", field=f"{SET} {key}", value=written, allowed="a key of a section")
        here[last] = _plain(key, written)
    return given


def _plain(key: str, written: str) -> Any:
    """Read a value as JSON, or a list or mapping as YAML; otherwise it is text, even if not for YAML (30:0.5)."""
    import yaml

    try:
        return json.loads(written)
    except ValueError:
        if not (written.startswith(("[", "{")) or any(re.fullmatch(form, written) for form in _NUMBERS.values())):
            return written
    try:
        return yaml.load(written, _loader(SET))  # a SafeLoader: builds plain values only
    except yaml.YAMLError:
        raise ConfigError("is not YAML", field=f"{SET} {key}", value=written) from None


def _loader(source: str) -> type[yaml.SafeLoader]:
    """Return a safe loader that reads numbers as people write them, and refuses a key given twice, which YAML drops."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in known if not tag.endswith((":int", ":float"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            where = f"{source}, line {key.start_mark.line + 1}"
            if not key.tag.endswith((":str", ":merge")):
                shown = key.value if isinstance(key, yaml.ScalarNode) else None
                raise ConfigError("key is not text", source=where, value=shown, allowed="a name")
            if key.value in seen:
                raise ConfigError("key is given twice", source=where, field=str(key.value), allowed="each key once")
            seen.add(key.value)
        return loader.construct_mapping(node, deep=True)

    def integer(loader: Loader, node: yaml.ScalarNode) -> int:
        written = str(loader.construct_scalar(node))
        return int(written, 0 if re.match("[-+]?0[ox]", written) else 10)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    Loader.add_constructor("tag:yaml.org,2002:int", integer)
    for kind, form in _NUMBERS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^({form})$"), [*"-+.0123456789"])
    return Loader


def read_yaml(path: Path, wanted: Kind | None = None) -> Any:
    """Read a YAML file into plain values; an empty one is an empty mapping. ``wanted``: what it should be."""
    import yaml

    text = read_text(path, ConfigError, wanted=wanted)
    try:
        data = yaml.load(text, _loader(str(path)))  # a SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark is not None else str(path)
        problem = f"is not YAML: {getattr(error, 'problem', None) or error}"
        raise ConfigError(problem if kind_in(text) else mistaken(path, problem), source=where) from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as error:  # PyYAML's own
        raise ConfigError(f"has a value that cannot be read: {error}", source=str(path)) from error
    return {} if data is None else data


def _walk(parts: list[str], schema: dict[str, Any]) -> tuple[list[str], dict[str, Any] | None]:
    """Follow a dotted field; return it as written in the file, and its schema, None if there is none.

    The kinds of sections, which the validator inserts, are not in the file.
    """
    node: dict[str, Any] | None = schema
    written = []
    for part in parts:
        here = _resolved(node or {}, schema)
        node = _variant(here, part, schema)
        if node is None:
            written.append(part)
            node = here.get("properties", {}).get(part)
    return written, node


def _variant(node: dict[str, Any], kind: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the section of this kind, if there are several."""
    for option in node.get("oneOf", ()):
        variant = _resolved(option, schema)
        if variant.get("properties", {}).get("kind", {}).get("const") == kind:
            return variant
    return None


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    for option in node.get("anyOf", ()):
        if option.get("type") != "null":
            node = option
            break
    reference = node.get("$ref")
    target: dict[str, Any] = schema["$defs"][reference.rsplit("/", 1)[1]] if reference else node
    return target


def _in_words(node: dict[str, Any]) -> str | None:
    if "properties" in node:
        return "the keys " + ", ".join(node["properties"])
    choices = node.get("enum", [node["const"]] if "const" in node else None)
    if choices is not None:
        return " or ".join(str(choice) or "''" for choice in choices)
    kind = {"integer": "an integer", "number": "a number", "string": "a string", "boolean": "true or false"}
    words = kind.get(node.get("type", ""))
    bounds = [f"{text} {node[key]:.16g}" for key, text in _BOUNDS.items() if key in node]
    return " ".join(filter(None, [words, " and ".join(bounds)])) if words else None
