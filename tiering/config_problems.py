"""Turns what pydantic finds wrong into lines an operator can act on: where, what was got, what is legal.

A value that came from the environment is shown as it was written, ``${NAME}``, and never as what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails

from tiering.document import Document, KeyPath, step
from tiering.registry import did_you_mean, nearest

_OURS: Final = ("value_error", "assertion_error")
_ABSENT: Final = object()


@dataclass(frozen=True)
class Problem:
    """One line of a ``ConfigError``."""

    path: KeyPath
    text: str


def problems_of(error: ValidationError, model: type[BaseModel], prefix: KeyPath, document: Document) -> list[Problem]:
    """Every problem in ``error``, raised when ``model`` met the part of ``document`` at ``prefix``."""
    found: dict[KeyPath, list[str]] = {}
    details = [(_written_path(detail, prefix, document), detail) for detail in error.errors(include_url=False)]
    paths = [path for path, _ in details]
    mistyped = {
        (*path[:-1], guess)
        for path, detail in details
        if detail["type"] == "extra_forbidden" and (guess := _guess(model, path, prefix))
    }
    for path, detail in details:
        # A key that is missing because its name is mistyped is one problem, not two.
        if _is_worse_branch(detail, path, paths, document) or (detail["type"] == "missing" and path in mistyped):
            continue
        text = _text(detail, path, prefix, model, document)
        texts = found.setdefault(path, [])
        if text not in texts:
            # The branches of a union: what was got is told once.
            texts.append(text.rsplit("; legal: ", 1)[-1] if texts else text)
    return [Problem(path, ", or ".join(texts)) for path, texts in found.items()]


def _written_path(detail: ErrorDetails, prefix: KeyPath, document: Document) -> KeyPath:
    """pydantic's location without the names of union branches and validators, which nobody wrote."""
    path = list(prefix)
    value = document.at(prefix)
    for position, part in enumerate(detail["loc"]):
        below = step(value, part, _ABSENT)
        if below is not _ABSENT:
            value = below
        elif position != len(detail["loc"]) - 1 or detail["type"] != "missing":
            continue
        path.append(part)
    return tuple(path)


def _is_worse_branch(detail: ErrorDetails, path: KeyPath, paths: Iterable[KeyPath], document: Document) -> bool:
    """Whether ``detail`` is about a union's branch that was not meant: a mapping was written, and another branch takes one."""
    if not isinstance(document.at(path), Mapping) or detail["type"] in _OURS:
        return False
    return any(len(other) > len(path) and other[: len(path)] == path for other in paths)


def _guess(model: type[BaseModel], path: KeyPath, prefix: KeyPath) -> str | None:
    return nearest(str(path[-1]), _keys_at(model, path[len(prefix) : -1]))


def _text(detail: ErrorDetails, path: KeyPath, prefix: KeyPath, model: type[BaseModel], document: Document) -> str:
    kind = detail["type"]
    context = detail.get("ctx", {})
    below = path[len(prefix) :]
    legal = _keys_at(model, below[:-1] if kind == "extra_forbidden" else below)
    if kind == "extra_forbidden":
        return f"unknown key{did_you_mean(str(path[-1]), legal)} (legal here: {', '.join(legal) or 'none'})"
    if kind == "missing":
        return f"missing; it needs a value{_help(model, below)}"
    if path in document.hidden:
        # A validator's own message may hold the value, or a part of it.
        reason = _help(model, below) if kind in _OURS else f"; legal: {_must(detail, legal)}"
        return f"got {document.shown(path)}, whose value is not legal here{reason}"
    if kind in _OURS:
        return _mask(str(context.get("error", detail["msg"])), path, document)
    return f"got {document.shown(path)}; legal: {_must(detail, legal)}"


def _must(detail: ErrorDetails, legal: list[str]) -> str:
    if detail["type"] == "literal_error":
        return str(detail.get("ctx", {})["expected"])
    if detail["type"] in ("model_type", "model_attributes_type"):
        return f"a mapping with {', '.join(legal)}"
    if detail["type"] == "dict_type":
        return "a mapping"
    if detail["type"] in ("tuple_type", "list_type"):
        return "a list (an empty one is written [])"
    if detail["type"] in ("string_type", "path_type"):
        return "text; put a number or true/false in quotes"
    return detail["msg"].removeprefix("Input should be ").partition(", unable to parse")[0]


def _mask(text: str, path: KeyPath, document: Document) -> str:
    for place, written in document.hidden.items():
        value = str(document.at(place))
        if place[: len(path)] == path and value:
            text = text.replace(repr(value)[1:-1], written).replace(value, written)
    return text


def _keys_at(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The legal YAML keys of the mapping at ``path`` below ``model``, in the order of the model."""
    return [field.alias or name for one in _models_at(model, path) for name, field in one.model_fields.items()]


def _help(model: type[BaseModel], path: KeyPath) -> str:
    """How the value at ``path`` is written, where its type says so, as sizes, times and shares do."""
    for one in _models_at(model, path[:-1]):
        for name, field in one.model_fields.items():
            if path[-1] == (field.alias or name):
                return next(
                    (
                        f" ({note[0].lower()}{note[1:].rstrip('.')})"
                        for note in _notes(field.annotation, field.metadata)
                    ),
                    "",
                )
    return ""


def _notes(annotation: Any, metadata: Iterable[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, WithJsonSchema) and item.json_schema and "description" in item.json_schema:
            yield item.json_schema["description"]
    for argument in get_args(annotation):
        yield from _notes(argument, getattr(argument, "__metadata__", ()))


def _models_at(model: type[BaseModel], path: KeyPath) -> list[type[BaseModel]]:
    models = [model]
    for part in path:
        if isinstance(part, int):
            continue
        fields = [field for one in models for name, field in one.model_fields.items() if part == (field.alias or name)]
        models = [found for field in fields for found in _models_in(field.annotation)]
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]
