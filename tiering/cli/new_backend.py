"""``tiering new-backend``: a package with a backend that passes the conformance kit, for an author to change."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tiering import registry
from tiering.cli import new_backend_files as files
from tiering.errors import ConfigError

NAME_CHARS_MAX: Final = 40
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TEMPLATE: Final = Path(__file__).with_name("new_backend_template.py")
_PLACEHOLDER: Final = re.compile(r"kvtiering_example|Example|example")


def new_backend(name: str, directory: Path | None) -> dict[str, Any]:
    """Write the package ``kvtiering-NAME`` to a new ``directory`` (None: ``kvtiering-NAME`` below the current one).

    Raises ``ConfigError`` for a name that cannot be one or is taken, and for a directory that exists or cannot be made.
    """
    _check(name)
    package = f"kvtiering-{name}"
    module = package.replace("-", "_")
    words = {"kvtiering_example": module, "Example": _class_name(name), "example": name}
    texts = {
        "pyproject.toml": files.PYPROJECT,
        "README.md": files.README,
        f"{module}.py": _TEMPLATE.read_text(encoding="utf-8"),
        f"tests/test_{module.removeprefix('kvtiering_')}.py": files.TESTS,
    }
    made = directory if directory is not None else Path(package)
    _write(made, {path: _PLACEHOLDER.sub(lambda found: words[found[0]], text) for path, text in texts.items()})
    return {"ok": True, "type": name, "package": package, "module": module, "path": str(made), "files": sorted(texts)}


def show(console: Console, result: dict[str, Any]) -> None:
    """What was written, and what to do next."""
    console.print(f"wrote {result['path']}:", soft_wrap=True)
    for path in result["files"]:
        console.print(f"  {path}", soft_wrap=True)
    console.print("next, in that directory: pip install -e '.[test]' && pytest", soft_wrap=True)


def _check(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
        near = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-")
        hint = f'; did you mean "{near}"?' if _NAME.fullmatch(near) and len(near) <= NAME_CHARS_MAX else ""
        raise ConfigError(
            f"{name!r} cannot be a backend's name: it is the type in the YAML, at most {NAME_CHARS_MAX} lower-case letters"
            f" and digits, in words joined by hyphens, the first of them a letter{hint}"
        )
    if name in registry.known_backends():
        raise ConfigError(
            f'a backend of type "{name}" is installed already, and a type has one owner; take another name'
        )


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))


def _write(directory: Path, texts: dict[str, str]) -> None:
    try:
        directory.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"{directory}: exists already, and nothing is overwritten; name another --directory"
        ) from None
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}; name a new --directory where you may write") from None
    try:
        for path, text in texts.items():
            (directory / path).parent.mkdir(exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except OSError as error:
        # It was made above, so that nobody else's file is in it; a part of a package helps nobody.
        shutil.rmtree(directory)
        raise ConfigError(f"{directory}: {error.strerror}; nothing was written") from None
