"""Re-store on and off: ten and more live conversations on one engine, whose CPU tier loses blocks of those that run.

The conversations run side by side, as on a server: each turn is a request, up to ``requests_max`` run at once, and the next
message comes a few steps after the answer. Steps are the clock, so that every run sees the same traffic whatever it costs.
There is no tier below CPU memory: what it loses is lost, unless it is stored again while the GPU has it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tiering.cli.demo.model import DemoModel
from tiering.cli.demo.options import Progress, TrafficScale
from tiering.cli.demo.serving import Tiers, engine_over, tiers_below
from tiering.connectors.reference import ReferenceEngine, Request
from tiering.connectors.reference.engine import IDLE_STEP_S

TRAFFIC_DEADLINE_S = 300.0
IN_STEP_BYTES_MAX = 1 << 30
"""All loads happen inside the step that admits the request, so that no run has steps that others have not."""

Outputs = Mapping[tuple[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Turn:
    conversation: int
    turn: int
    prompt_tokens: int
    device_tokens: int
    tier_tokens: int
    ttft_s: float
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrafficRun:
    """One run of the traffic under one policy, with re-store or without."""

    policy: str
    restore: bool
    turns: tuple[Turn, ...]
    restored_blocks: int
    restore_bytes: int
    restore_skipped: Mapping[str, int]
    evicted_blocks: int
    holes: tuple[int, ...]
    """When each turn's prompt arrived: blocks missing with a present one behind them in the same prefix."""
    tokens_per_block: int
    steps: int
    seconds: float
    """Of its own steps."""

    @property
    def outputs(self) -> Outputs:
        return {(turn.conversation, turn.turn): turn.output_ids for turn in self.turns}

    @property
    def measured(self) -> list[Turn]:
        """All but the first turns, which have nothing to find."""
        return [turn for turn in self.turns if turn.turn]

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens for turn in self.measured)

    @property
    def hit_tokens(self) -> int:
        """Found in the CPU tier."""
        return sum(turn.tier_tokens for turn in self.measured)

    @property
    def token_hit_rate(self) -> float:
        """Of the prompts' tokens, found on the GPU or in the CPU tier."""
        return (self.hit_tokens + sum(turn.device_tokens for turn in self.measured)) / self.prompt_tokens

    @property
    def ttft_median_ms(self) -> float:
        return statistics.median(turn.ttft_s * 1e3 for turn in self.measured)

    @property
    def holes_mean(self) -> float:
        return statistics.fmean(self.holes)

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "restore": self.restore,
            "turns": len(self.turns),
            "prompt_tokens": self.prompt_tokens,
            "device_tokens": sum(turn.device_tokens for turn in self.measured),
            "hit_tokens": self.hit_tokens,
            "token_hit_rate": self.token_hit_rate,
            "restored_blocks": self.restored_blocks,
            "restore_bytes": self.restore_bytes,
            "restore_skipped": dict(self.restore_skipped),
            "evicted_blocks": self.evicted_blocks,
            "holes_mean": self.holes_mean,
            "hole_tokens_mean": self.holes_mean * self.tokens_per_block,
            "ttft_ms": self.ttft_median_ms,
            "steps": self.steps,
            "seconds": self.seconds,
        }


class Script:
    """What the users say, and the prompts that pass through: token ids from the seed, the same in every run."""

    def __init__(self, scale: TrafficScale, seed: int) -> None:
        self._scale = scale
        self._seed = seed

    def opening(self, conversation: int) -> list[int]:
        return self._tokens(f"opening {conversation}", self._scale.opening_tokens)

    def message(self, conversation: int, turn: int) -> list[int]:
        return self._tokens(f"message {conversation} {turn}", self._scale.message_tokens)

    def passing(self, step: int) -> list[int]:
        return self._tokens(f"passing {step}", self._scale.passing_tokens)

    def _tokens(self, what: str, count: int) -> list[int]:
        source = random.Random(f"{self._seed} live {what}")
        return [source.randrange(self._scale.model.vocab) for _ in range(count)]


def expected_outputs(scale: TrafficScale, model: DemoModel, seed: int, progress: Progress) -> Outputs:
    """The answers by transformers alone, one conversation after another, each in a cache that grows from turn to turn."""
    script = Script(scale, seed)
    outputs = {}
    progress("live, plain", 0, scale.turns_total)
    for conversation in range(scale.conversations):
        cache, unread = model.empty_cache(), script.opening(conversation)
        for turn in range(scale.turns):
            unread += script.message(conversation, turn)
            answer: list[int] = []
            while len(answer) < scale.answer_tokens:
                answer.append(int(model.forward(unread, cache).argmax()))
                unread = answer[-1:]
            outputs[conversation, turn] = tuple(answer)
            progress("live, plain", len(outputs), scale.turns_total)
    return outputs


def run_pair(
    scale: TrafficScale, model: DemoModel, seed: int, progress: Progress, policy: str
) -> tuple[TrafficRun, TrafficRun]:
    """The traffic without re-store and with it.

    The two take turns, step by step, each with a clock that stands still while the other has its turn: whatever else the
    machine does slows both alike.
    """
    with ExitStack() as stack:
        runs = []
        for restore in (False, True):
            runner = model.runner(num_gpu_blocks=scale.device_blocks + 1, tokens_per_block=scale.tokens_per_block)
            config = _config(scale, policy, restore)
            tiers = stack.enter_context(tiers_below(runner, config, load_in_step_bytes_max=IN_STEP_BYTES_MAX))
            clock = _Clock()
            engine = engine_over(
                runner,
                tiers,
                step_tokens_max=_step_tokens_max(scale),
                requests_max=scale.requests_max,
                now=clock.now,
            )
            runs.append(_Traffic(scale, Script(scale, seed), engine, tiers, clock))
        _run(runs, f"re-store, {policy}", progress)
        off, on = (run.result(policy, restore=restore) for run, restore in zip(runs, (False, True), strict=True))
    return off, on


def _config(scale: TrafficScale, policy: str, restore: bool) -> dict[str, Any]:
    """Blocks are stored as soon as they are computed: so they are in the tier, and can be lost, while requests run."""
    return {
        "primary": {
            "capacity": scale.primary_blocks * scale.block_bytes,
            "policy": policy,
            "store_when": "computed",
            "store_reserve": "0%",
        },
        "restore": {"enabled": restore},
    }


def _step_tokens_max(scale: TrafficScale) -> int:
    """Room for two whole prompts and a passing one beside the requests that decode."""
    return 2 * scale.sequence_tokens_max + scale.passing_tokens + scale.tokens_per_block


def _run(runs: Sequence[_Traffic], name: str, progress: Progress) -> None:
    """Step all of them in turn until each has served all turns, and then until all copies have ended."""
    until_s = time.perf_counter() + TRAFFIC_DEADLINE_S
    total = sum(run.turns_total for run in runs)
    progress(name, 0, total)
    while any(not run.is_served for run in runs):
        if time.perf_counter() > until_s:
            raise TimeoutError(f"{name}: the turns were not served within {TRAFFIC_DEADLINE_S:g} s")
        for run in runs:
            if not run.is_served:
                run.step()
        progress(name, sum(len(run.turns) for run in runs), total)
    for run in runs:
        run.drain()


class _Clock:
    """Seconds that passed between ``start`` and ``stop``, all times added up."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._started_s: float | None = None

    def start(self) -> None:
        self._started_s = time.perf_counter()

    def stop(self) -> None:
        self._before_s, self._started_s = self.now(), None

    def now(self) -> float:
        return self._before_s + (0.0 if self._started_s is None else time.perf_counter() - self._started_s)


class _Traffic:
    """One run: who says what at which step, and what came of it. Answers come from the engine and are part of later prompts."""

    def __init__(
        self, scale: TrafficScale, script: Script, engine: ReferenceEngine, tiers: Tiers, clock: _Clock
    ) -> None:
        """``clock``: the engine's, which runs during steps alone."""
        self.turns: list[Turn] = []
        self.turns_total = scale.turns_total
        self._scale = scale
        self._script = script
        self._engine = engine
        self._manager = tiers.manager
        self._clock = clock
        self._steps = 0
        self._holes: list[int] = []
        self._said = [script.opening(number) for number in range(scale.conversations)]
        self._answered = [0] * scale.conversations
        self._due = {number: number * scale.stagger_steps for number in range(scale.conversations)}
        """The step at which a conversation that waits for its user goes on."""
        self._live: dict[str, int] = {}
        """Requests that are turns of a conversation, and of which."""

    @property
    def is_served(self) -> bool:
        return len(self.turns) == self.turns_total

    def step(self) -> None:
        self._clock.start()
        self._arrive()
        result = self._engine.step()
        self._clock.stop()
        self._steps += 1
        for request in result.finished:
            self._finish(request)
        if not result.scheduled_tokens:
            time.sleep(IDLE_STEP_S)

    def drain(self) -> None:
        self._clock.start()
        self._engine.run()
        self._clock.stop()

    def result(self, policy: str, *, restore: bool) -> TrafficRun:
        """Once it is drained, while its manager is open."""
        stats = self._manager.stats()
        return TrafficRun(
            policy=policy,
            restore=restore,
            turns=tuple(self.turns),
            restored_blocks=stats["restored_blocks"],
            restore_bytes=stats["restore_bytes"],
            restore_skipped=stats["restore_skipped"],
            evicted_blocks=stats["evicted_blocks"],
            holes=tuple(self._holes),
            tokens_per_block=self._scale.tokens_per_block,
            steps=self._steps,
            seconds=self._clock.now(),
        )

    def _arrive(self) -> None:
        for conversation in [number for number, step in self._due.items() if step <= self._steps]:
            del self._due[conversation]
            self._holes.append(self._manager.stats()["holes"])
            turn = self._answered[conversation]
            self._said[conversation] += self._script.message(conversation, turn)
            name = f"{conversation}.{turn}"
            self._live[name] = conversation
            self._engine.add_request(name, self._said[conversation], max_tokens=self._scale.answer_tokens)
        self._engine.add_request(f"passing {self._steps}", self._script.passing(self._steps), max_tokens=1)

    def _finish(self, request: Request) -> None:
        conversation = self._live.pop(request.request_id, None)
        if conversation is None:
            return
        record = request.record
        if record.ttft_s is None:
            raise RuntimeError(f"request {request.request_id} was answered without a first token")
        self.turns.append(
            Turn(
                conversation=conversation,
                turn=self._answered[conversation],
                prompt_tokens=request.num_prompt_tokens,
                device_tokens=record.engine_tokens,
                tier_tokens=record.tier_tokens,
                ttft_s=record.ttft_s,
                output_ids=tuple(request.output_ids),
            )
        )
        self._said[conversation] = list(request.token_ids)
        self._answered[conversation] += 1
        if self._answered[conversation] < self._scale.turns:
            self._due[conversation] = self._steps + self._scale.pause_steps
