"""``tiering bench s3``: the figures it owes, for each client, and a server that ends with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Done, run
from tests.cli.test_bench_redis import MIB, require_figures, with_few_bytes
from tests.cli.test_docs import documented_fields, fields_of

Command = Callable[..., Done]


def test_the_figures_of_each_client_and_block_size(tmp_path: Path, root: Path) -> None:
    done = run(
        "bench", "s3", "--pairs", "3", "--json", cwd=tmp_path, program=with_few_bytes("bench_s3"), TMPDIR=str(tmp_path)
    )
    assert (done.code, done.err) == (0, "")
    result = done.object
    assert {"ok": True, "pairs": 3, "bytes_per_run": 4 * MIB, "requests": 8}.items() <= result.items()
    sizes = [256 << 10, MIB, 4 * MIB]
    assert [(size["client"], size["block_bytes"]) for size in result["sizes"]] == [
        (client, size) for client in ("obstore", "s3fs") for size in sizes
    ]
    for size in result["sizes"]:
        require_figures({"sizes": [size]}, size["client"], {"tiering", size["client"]})
    section = (root / "docs/cli.md").read_text().partition("\n## bench s3\n")[2].partition("\n## ")[0]
    assert documented_fields(section) == fields_of(result)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["http://bucket/x", "bucket", "s3:///x"])
def test_a_url_that_is_no_bucket_is_refused(tiering: Command, url: str) -> None:
    done = tiering("bench", "s3", "--url", url)
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --url: write s3://BUCKET/PREFIX; the endpoint comes from AWS_ENDPOINT_URL\n"


def test_an_endpoint_that_is_not_there_is_told(tiering: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
        ("AWS_ACCESS_KEY_ID", "abcdef"),
        ("AWS_SECRET_ACCESS_KEY", "abcdefgh"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    done = tiering("bench", "s3", "--url", "s3://bucket/x")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: fsspec.open: bucket bucket: LIST: http://127.0.0.1:9: Connection refused\n"


def test_five_rounds_unless_told_otherwise(tiering: Command) -> None:
    assert "[default: 5]" in tiering("bench", "s3", "--help").out
