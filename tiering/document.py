"""A configuration as it was written: YAML text or a mapping, read with its line numbers and its ``${VARIABLES}``.

The reader takes fewer plain scalars for more than text than YAML does, because names and versions look like numbers:
``on``, ``no``, ``12:30`` (750 in YAML 1.1), ``010`` (8), ``2026-01-31`` (a date) and ``12e45`` (a number in YAML 1.2) stay
what was written. Only ``true``/``false``, ``null``/``~``, whole numbers of up to 19 digits without leading zeros, and
numbers with a point are converted. Keys are always text, and a key given twice is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import yaml

from tiering.errors import ConfigError

KeyPath: TypeAlias = tuple[str | int, ...]

FILE_BYTES_MAX: Final = 1 << 20
VALUES_MAX: Final = 10_000
"""Most values in one document, with YAML aliases written out: an alias of aliases cannot fill the memory."""
DEPTH_MAX: Final = 32

_TAG: Final = "tag:yaml.org,2002:"


class _Scalar(NamedTuple):
    pattern: re.Pattern[str]
    first: list[str]
    """The characters it may begin with; "" stands for the empty text."""
    convert: Callable[[str], object]


_SCALARS: Final = {
    "null": _Scalar(re.compile(r"(?:~|null|Null|NULL|)\Z"), [*"~nN", ""], lambda _: None),
    "bool": _Scalar(
        re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), [*"tTfF"], lambda text: text.lower() == "true"
    ),
    "int": _Scalar(re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})\Z"), [*"-+0123456789"], int),
    "float": _Scalar(
        re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z"), [*"-+.0123456789"], float
    ),
}
_VARIABLE: Final = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{")


def _here() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "a directory that was deleted"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - replaces a class attribute of the base


for _name, _scalar in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, _scalar.pattern, _scalar.first)


@dataclass(frozen=True)
class Document:
    """``data`` holds dicts, lists and scalars, with every ``${VARIABLE}`` replaced."""

    where: str
    """The file, as the caller named it; for people."""
    data: dict[str, Any] = field(repr=False)
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """The line of each key, counted from 1. Empty unless the document came from a file."""
    hidden: Mapping[KeyPath, str] = field(default_factory=dict)
    """What was written where a value came from the environment. Messages show this and never the value."""

    def at(self, path: KeyPath) -> Any:
        """The value at ``path``; None if there is none."""
        value: Any = self.data
        for part in path:
            value = step(value, part, None)
        return value

    def shown(self, path: KeyPath) -> str:
        """The value at ``path`` for a message: short, and ``${NAME}`` where it came from the environment."""
        if path in self.hidden:
            return self.hidden[path]
        value = self.at(path)
        return "a mapping" if isinstance(value, Mapping) else _kind(value)

    def line(self, path: KeyPath) -> int:
        """The line of ``path``, or of the nearest thing around it that was written; 0 if there is none."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 0)

    def place(self, path: KeyPath) -> str:
        """``local.yaml:3: tiers[0].path``: what a message about ``path`` starts with."""
        return _place(self.where, path, self.line(path))


def dotted(path: KeyPath) -> str:
    """``("tiers", 0, "path")`` as ``tiers[0].path``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def step(value: Any, part: str | int, absent: Any) -> Any:
    """The item ``part`` of the mapping or list ``value``; ``absent`` if it has none."""
    if isinstance(value, Mapping):
        return value.get(part, absent)
    return value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else absent


def _place(where: str, path: KeyPath, line: int) -> str:
    return f"{where}{f':{line}' if line else ''}{f': {dotted(path)}' if path else ''}"


def read_document(path: str | os.PathLike[str]) -> Document:
    """The YAML file at ``path`` (``~`` is the home directory).

    Raises ``ConfigError`` with file and line: no such file, not UTF-8, bad YAML, a key given twice, not a mapping,
    an environment variable that is not set.
    """
    where = os.fspath(path)
    text = _read_text(Path(where), where)
    try:
        node = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_error(error, text, where)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: values are nested more than {DEPTH_MAX} deep") from None
    reader = _Reader(where)
    data = None if node is None else reader.node(node, ())
    if data is None:
        raise ConfigError(f"{where}: the file is empty; it needs at least `primary: {{capacity: 1GiB}}`")
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: holds {_kind(data)}; a configuration is a mapping of keys such as `primary:`")
    return Document(where, data, reader.lines, reader.hidden)


def document_of(mapping: Mapping[str, Any], *, where: str = "configuration") -> Document:
    """The same from a mapping, as ``yaml.safe_load`` or a program makes it. ``mapping`` is copied, not kept."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: got {_kind(mapping)}; a configuration is a mapping of keys such as `primary`")
    reader = _Reader(where)
    return Document(where, reader.value(mapping, ()), {}, reader.hidden)


def _read_text(path: Path, where: str) -> str:
    try:
        with path.expanduser().open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such file (looked from {_here()})") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: "~name" of an unknown user
        raise ConfigError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{where}: larger than {FILE_BYTES_MAX} bytes; this is not a configuration")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{where}:{line}: not UTF-8 text") from None


def _syntax_error(error: yaml.MarkedYAMLError, text: str, where: str) -> str:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"{where}: not valid YAML: {error.problem}"
    lines = text.splitlines()
    written = lines[mark.line] if mark.line < len(lines) else ""
    hint = '; inside {} or [] a variable needs quotes: "${NAME}"' if "${" in written else ""
    return f"{where}:{mark.line + 1}: not valid YAML: {error.problem or error.context}{hint}"


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return "a list"
    return f"{value!r:.60}"


class _Reader:
    """Copies one document, replaces its variables, and remembers where everything stood."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.lines: dict[KeyPath, int] = {}
        self.hidden: dict[KeyPath, str] = {}
        self._values = 0

    def node(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self._count(path, line)
        tag = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and tag == "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return [self.node(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and tag == "str":
            return self._substitute(node.value, path, line)
        if isinstance(node, yaml.ScalarNode) and tag in _SCALARS and _SCALARS[tag].pattern.match(node.value):
            return _SCALARS[tag].convert(node.value)
        raise self._error(path, f"the tag {node.tag!r} is not supported here; write plain YAML", line)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(path, "a key must be plain text", line)
            key = key_node.value
            here = (*path, key)
            if key in result:
                raise self._error(here, f"given twice, first in line {self.lines[here]}; keep one", line)
            self.lines[here] = line
            result[key] = self.node(value_node, here)
        return result

    def value(self, value: Any, path: KeyPath) -> Any:
        self._count(path, 0)
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise self._error(path, f"the key {key!r} is not text", 0)
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item, (*path, index)) for index, item in enumerate(value)]
        return self._substitute(value, path, 0) if isinstance(value, str) else value

    def _count(self, path: KeyPath, line: int) -> None:
        self._values += 1
        if self._values > VALUES_MAX:
            raise self._error((), f"holds more than {VALUES_MAX} values, aliases written out", line)
        if len(path) > DEPTH_MAX:
            raise self._error(path[:3], f"values are nested more than {DEPTH_MAX} deep", line)

    def _substitute(self, text: str, path: KeyPath, line: int) -> str:
        if "${" not in text:
            return text

        def replace(found: re.Match[str]) -> str:
            name, default = found["name"], found["default"]
            if name is None:
                raise self._error(path, "a variable is written ${NAME} or ${NAME:-default}", line)
            value = os.environ.get(name, "")
            if value or (default is None and name in os.environ):
                return value
            if default is None:
                remedy = f"set it, or give a default: ${{{name}:-...}}"
                raise self._error(path, f"the environment variable {name} is not set; {remedy}", line)
            return default

        # A default is replaced too, but it stands in the file for all to read; hiding it costs nothing.
        self.hidden[path] = text
        return _VARIABLE.sub(replace, text)

    def _error(self, path: KeyPath, message: str, line: int) -> ConfigError:
        return ConfigError(f"{_place(self.where, path, line)}: {message}")
