"""What ``tiering new-backend`` writes beside the module: packaging, the test class, a README."""

from __future__ import annotations

from typing import Final

PYPROJECT: Final = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "kvtiering-example"
version = "0.1.0"
description = "A kvtiering tier"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["kvtiering"]

[project.optional-dependencies]
test = ["kvtiering[test]"]

# The name is the `type` in the YAML, the value the configuration's class.
[project.entry-points."tiering.backends"]
example = "kvtiering_example:ExampleConfig"

[tool.hatch.build.targets.wheel]
only-include = ["kvtiering_example.py"]

[tool.pytest.ini_options]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
filterwarnings = ["error"]
"""

TESTS: Final = '''\
"""The ten rules of a kvtiering backend, kept by this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtiering_example import ExampleBackend, ExampleConfig

from tiering.testing import BackendTests


class TestExample(BackendTests):
    corrupt_supported = True

    def make_backend(self, tmp_path: Path) -> ExampleBackend:
        return ExampleBackend(ExampleConfig(path=tmp_path / "blocks"))

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        """Damage the block that was stored last under ``key``, so that the kit sees it found out."""
        files = sorted((tmp_path / "blocks").glob(f"*/{key.hex()}"), key=lambda file: file.stat().st_mtime_ns)
        if not files:
            return False
        files[-1].write_bytes(edit(files[-1].read_bytes()))
        return True
'''

README: Final = """\
# kvtiering-example

A kvtiering tier. It keeps one file a block in a directory, and passes the conformance kit as it is: replace the parts that
touch the medium by your own, one at a time, and run the kit after each.

```console
$ pip install -e '.[test]'
$ pytest
$ tiering check kv.yaml
```

with, in `kv.yaml`:

```yaml
primary: {capacity: 64MiB}
tiers:
  - {type: example, path: ./blocks}
```

| key | default | effect |
| --- | --- | --- |
| `path` | required | the directory; made if it is missing. Processes may share it |

Nothing bounds the directory: remove what is old, or make the tier exclusive and let the manager keep it within `capacity`.

The contract, the kit and the common mistakes are in kvtiering's guide for authors, `docs/backend-author-guide.md`.
"""
