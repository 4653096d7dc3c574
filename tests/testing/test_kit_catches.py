"""The conformance kit against backends that break one rule each, and against right ones beside the built-in tiers."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.testing import broken_conduct as conduct
from tests.testing import broken_values as values
from tests.testing.directory_backend import DirectoryBackend
from tiering.api import Backend
from tiering.testing import BackendTests
from tiering.testing.conformance.rules import RULES

CASES: list[tuple[type[Backend], str]] = [
    # (backend, the test that must fail and then name the rule or the capability of its own name)
    (values.ReversesOutcomes, "test_rule_01_outcomes_stand_in_the_order_of_the_batch"),
    (values.AnswersEachKeyOnce, "test_rule_01_repeated_keys_are_legal"),
    (values.FailsOnEmptyBatches, "test_rule_01_empty_batches_are_legal"),
    (values.FoldsKeys, "test_rule_01_keys_are_opaque_bytes"),
    (values.StoresHalfABatch, "test_rule_01_a_whole_batch_at_the_declared_limit"),
    (values.NeverReturns, "test_rule_01_outcomes_stand_in_the_order_of_the_batch"),
    (values.SaysRefusedToLoads, "test_rule_01_outcomes_stand_in_the_order_of_the_batch"),
    (values.RaisesOnMissing, "test_rule_01_to_06_over_random_histories"),
    (values.AnswersHalfOfAFullBatch, "test_rule_01_a_whole_batch_at_the_declared_limit"),
    (values.RaisesOnMissing, "test_rule_02_missing_is_a_value"),
    (values.SaysYesToAll, "test_rule_02_missing_is_a_value"),
    (values.NeverOpens, "test_rule_02_missing_is_a_value"),
    (values.RaisesWhatItsClientRaises, "test_rule_02_a_failing_medium_is_told_and_overcome"),
    (values.ForgetsNothing, "test_rule_02_a_deleted_block_is_missing_and_can_be_stored_again"),
    (values.StopsAtTheFirstMissing, "test_rule_03_missing_blocks_do_not_spoil_the_batch"),
    (values.StopsAtTheFirstMissing, "test_rule_03_bad_blocks_do_not_spoil_the_batch"),
    (values.RefusesAllOrNothing, "test_rule_03_a_refused_block_does_not_spoil_the_batch"),
    (values.FillsHalfABatch, "test_rule_04_every_payload_size_in_place"),
    (values.FillsACopy, "test_rule_04_every_payload_size_in_place"),
    (values.KeepsViews, "test_rule_04_views_are_given_back_by_calls_that_find_nothing"),
    (values.ScribblesIntoSrc, "test_rule_04_every_payload_size_in_place"),
    (values.DirtiesThePadding, "test_rule_04_every_payload_size_in_place"),
    (values.NeedsMoreAlignmentThanDeclared, "test_rule_04_every_payload_size_in_place"),
    (values.ReferencesSrc, "test_rule_04_src_may_be_reused_after_store"),
    (values.GivesANeighboursBytes, "test_rule_05_no_block_gets_a_neighbours_bytes"),
    (values.NeverVerifies, "test_rule_05_another_length_is_not_ok"),
    (values.NeverVerifies, "test_rule_05_damaged_images_are_never_served"),
    (values.TrustsLengthsOnly, "test_rule_05_damaged_payloads_are_corrupt"),
    (values.TrustsLengthsOnly, "test_rule_05_swapped_and_foreign_blocks_are_corrupt"),
    (values.TrustsLengthsOnly, "test_rule_05_damage_among_good_blocks"),
    (values.IgnoresTheNamespace, "test_rule_05_another_namespace_never_sees_a_block"),
    (values.IgnoresTheEpoch, "test_rule_05_another_epoch_misses"),
    (values.LosesOtherNamespaces, "test_rule_05_another_epoch_misses"),
    (values.KeepsBadBlocks, "test_rule_05_damaged_payloads_are_corrupt"),
    (conduct.PublishesParts, "test_rule_06_readers_see_all_or_nothing"),
    (conduct.UsesOneTemporaryName, "test_rule_06_concurrent_writers_of_one_block_all_succeed"),
    (conduct.ClaimsWhatItCouldNotWrite, "test_rule_02_a_failing_medium_is_told_and_overcome"),
    (conduct.RefusesWhatItHas, "test_rule_06_store_is_idempotent"),
    (conduct.LosesItsBlocksWhenKilled, "test_rule_06_a_killed_writer_leaves_whole_blocks_only"),
    (conduct.LoadsInAnAbandonedThread, "test_rule_07_a_cancelled_load_leaves_dest_alone"),
    (conduct.StoresInAnAbandonedThread, "test_rule_07_a_cancelled_store_leaves_src_alone"),
    (conduct.LoadsInAnAbandonedThread, "test_rule_07_cancelled_calls_on_a_hung_medium_leave_the_buffers_alone"),
    (conduct.StoresInAnAbandonedThread, "test_rule_07_cancelled_calls_on_a_hung_medium_leave_the_buffers_alone"),
    (conduct.YieldsToTheSecondCancellation, "test_rule_07_a_cancelled_load_leaves_dest_alone"),
    (conduct.BreaksOnACancelledLookup, "test_rule_07_cancelled_lookups_and_deletes_leave_the_backend_usable"),
    (conduct.OneCallAtATime, "test_rule_08_calls_overlap"),
    (conduct.FailsDeletesDuringLoads, "test_rule_08_deletes_and_loads_of_one_block_overlap"),
    (conduct.MissesWhatIsSlow, "test_rule_08_a_slow_medium_only_takes_longer"),
    (conduct.CrossesItsWires, "test_rule_08_a_slow_medium_only_takes_longer"),
    (conduct.OneThreadACall, "test_rule_08_fan_out_is_bounded"),
    (conduct.ClosesOnce, "test_rule_09_aclose_is_idempotent"),
    (conduct.NeedsAnOpenToClose, "test_rule_09_aclose_without_open"),
    (conduct.ServesWhenClosed, "test_rule_09_each_method_raises_closed_error_afterwards"),
    (conduct.ClosesWithoutWaiting, "test_rule_09_aclose_waits_for_calls_in_flight"),
    (conduct.IgnoresItsDeadline, "test_rule_09_aclose_keeps_its_deadline_on_a_hung_medium"),
    (conduct.LeavesWhatRuns, "test_rule_09_aclose_keeps_its_deadline_on_a_hung_medium"),
    (conduct.ReleasesInDel, "test_rule_09_nothing_happens_in_del"),
    (conduct.StartsAThreadWhenConstructed, "test_rule_10_construction_does_nothing"),
    (conduct.LeavesAThread, "test_rule_10_nothing_outlives_aclose"),
    (conduct.LeavesATask, "test_rule_10_nothing_outlives_aclose"),
    (conduct.LeavesAFile, "test_rule_10_nothing_outlives_aclose"),
    (conduct.LogsEachBlock, "test_rule_10_no_log_line_a_block"),
    (conduct.OddlyAligned, "test_capabilities_are_consistent"),
    (conduct.NeverDeletes, "test_capabilities_are_consistent"),
    (conduct.CannotTellWhatItHolds, "test_capabilities_are_consistent"),
    (conduct.TakesAnySize, "test_capability_value_bytes_max_is_checked_at_open"),
    (conduct.CountsPayloadsTwice, "test_capability_usage_is_real"),
    (conduct.CountsEachStore, "test_capability_usage_is_real"),
    (conduct.LosesItsBlocksWhenKilled, "test_capability_persistent_blocks_are_found_again"),
    (conduct.ScansNothing, "test_capability_scan_lists_what_is_stored"),
    (conduct.ScansInAnyOrder, "test_capability_scan_lists_what_is_stored"),
    (conduct.ScansForeignBlocksAsItsOwn, "test_capability_scan_tells_foreign_blocks"),
    (conduct.SharesWithNobody, "test_capability_shared_backends_see_each_other"),
    (conduct.WipesAtOpen, "test_capability_exclusive_second_owner_does_no_harm"),
]

OTHERWISE = {
    # What a test says where its name does not tell.
    (values.RaisesOnMissing, "test_rule_01_to_06_over_random_histories"): "rule 2",
    (conduct.ClaimsWhatItCouldNotWrite, "test_rule_02_a_failing_medium_is_told_and_overcome"): "rule 6",
    (conduct.OddlyAligned, "test_capabilities_are_consistent"): "capability alignment_bytes",
    (conduct.NeverDeletes, "test_capabilities_are_consistent"): "capability can_delete",
    (conduct.CannotTellWhatItHolds, "test_capabilities_are_consistent"): "capability can_scan",
    (conduct.LosesItsBlocksWhenKilled, "test_capability_persistent_blocks_are_found_again"): "rule 6",
    (conduct.ScansNothing, "test_capability_scan_lists_what_is_stored"): "capability can_scan",
    (conduct.ScansInAnyOrder, "test_capability_scan_lists_what_is_stored"): "capability can_scan",
    (conduct.ScansForeignBlocksAsItsOwn, "test_capability_scan_tells_foreign_blocks"): "capability can_scan",
    (conduct.SharesWithNobody, "test_capability_shared_backends_see_each_other"): "rule 6",
    (conduct.WipesAtOpen, "test_capability_exclusive_second_owner_does_no_harm"): "rule 6",
}


def named(kind: type[Backend], test: str) -> str:
    """With which words the failure of ``test`` over ``kind`` begins."""
    if (kind, test) in OTHERWISE:
        return OTHERWISE[kind, test]
    rule, capability = re.match(r"test_rule_(\d\d)_", test), re.match(r"test_capability_(value_bytes_max|usage)_", test)
    if rule:
        return f"rule {int(rule[1])}"
    assert capability, test
    return f"capability {capability[1]}"


class DirectoryKit(BackendTests):
    """The kit over a class of backends that are made of a path. The subclasses below name the class."""

    corrupt_supported = True
    call_timeout_s = 2.0
    kind: Callable[[Path], Backend] = DirectoryBackend

    def make_backend(self, tmp_path: Path) -> Backend:
        return type(self).kind(tmp_path / "blocks")

    def corrupt(self, tmp_path: Path, key: bytes, edit: Callable[[bytes], bytes]) -> bool:
        files = sorted((tmp_path / "blocks").glob(f"*-{key.hex()}"), key=lambda file: file.stat().st_mtime_ns)
        if files:
            files[-1].write_bytes(edit(files[-1].read_bytes()))
        return bool(files)


class TestDirectory(DirectoryKit):
    """A right backend that is persistent and exclusive passes whole."""


class LosesItsBlocksWhenKilledKit(DirectoryKit):
    """At module level, since a child process imports it."""

    kind = conduct.LosesItsBlocksWhenKilled


@pytest.fixture
def ended_leaks() -> Iterator[None]:
    yield
    for leak in conduct.Leaking.leaks:
        if isinstance(leak, int):
            os.close(leak)
        else:
            stop, thread = leak
            stop.set()
            thread.join()
    conduct.Leaking.leaks.clear()


@pytest.mark.usefixtures("ended_leaks")
@pytest.mark.parametrize(("kind", "test"), CASES, ids=[f"{kind.__name__}-{test[5:]}" for kind, test in CASES])
def test_the_kit_catches(kind: type[Backend], test: str, tmp_path: Path) -> None:
    failure = run_one(kit_of(kind), test, tmp_path)
    assert isinstance(failure, AssertionError), f"{test} over {kind.__name__}: {failure!r}"
    words = named(kind, test)
    number = words.removeprefix("rule ")
    assert str(failure).startswith(f"{words} ({RULES[int(number)]}): " if number.isdigit() else f"{words}: "), failure


def test_the_rules_are_those_that_the_contract_tells() -> None:
    assert Backend.__doc__
    assert re.findall(r"^    (\d+)\. ", Backend.__doc__, re.MULTILINE) == [str(rule) for rule in RULES]


def test_the_kit_catches_a_heavy_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "imports_too_much.py"
    module.write_text("import fsspec\nfrom backends.memory import MemoryBackend\n\nclass Heavy(MemoryBackend): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    heavy = importlib.import_module("imports_too_much").Heavy
    kind = type("Heavy", (values.Plain,), {"__module__": heavy.__module__})
    failure = run_one(kit_of(kind), "test_rule_10_no_heavy_import_before_open", tmp_path)
    assert isinstance(failure, AssertionError)
    assert "fsspec" in str(failure)


def test_a_right_backend_that_several_owners_share_passes(tmp_path: Path) -> None:
    kit = type("SharedKit", (DirectoryKit,), {"kind": functools.partial(DirectoryBackend, shared=True)})
    for test in names_of(kit):
        if test.startswith("test_capability") or "readers" in test or "writers" in test:
            (tmp_path / test).mkdir()
            assert run_one(kit, test, tmp_path / test) is None


@pytest.mark.parametrize("rule", range(1, 11))
def test_every_rule_has_a_broken_backend(rule: int) -> None:
    assert f"rule {rule}" in {named(*case) for case in CASES}


def test_every_test_of_the_kit_was_seen_to_fail() -> None:
    """A test that no backend ever failed proves little."""
    assert set(names_of(BackendTests)) == {test for _, test in CASES} | {"test_rule_10_no_heavy_import_before_open"}


def names_of(kit: type[BackendTests]) -> list[str]:
    return [name for name in dir(kit) if name.startswith("test_")]


def kit_of(kind: type[Backend]) -> type[BackendTests]:
    if kind is conduct.LosesItsBlocksWhenKilled:
        return LosesItsBlocksWhenKilledKit
    return type(f"{kind.__name__}Kit", (DirectoryKit,), {"kind": kind})


def run_one(kit: type[BackendTests], test: str, tmp_path: Path) -> BaseException | None:
    """What ``test`` of ``kit`` raises, run as pytest would."""
    method = getattr(kit(), test)
    try:
        if inspect.iscoroutinefunction(method):
            asyncio.run(method(tmp_path))
        else:
            method(tmp_path)
    except Exception as error:
        return error
    return None
