"""The conversations: a shared system prompt, a long document each, and short turns, interleaved."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tiering.cli.demo.options import Progress, Scale
from tiering.cli.demo.record import TurnRecord
from tiering.cli.demo.serving import Server


class Workload:
    """Token ids from a seed, the same in every process. Answers come from the engine and are part of later prompts."""

    def __init__(self, scale: Scale, *, conversations: int, turns: int, seed: int) -> None:
        self.scale = scale
        self.conversations = conversations
        self.turns = turns
        self._seed = seed
        self._system = self.tokens("system", scale.system_tokens)

    def opening(self, conversation: int) -> list[int]:
        """System prompt and document."""
        return self._system + self.tokens(f"document {conversation}", self.scale.document_tokens)

    def message(self, conversation: int, turn: int) -> list[int]:
        return self.tokens(f"message {conversation} {turn}", self.scale.message_tokens)

    def prompt(self, conversation: int, answers: Sequence[Sequence[int]]) -> list[int]:
        """The prompt of turn ``len(answers)``: everything said before, and the next message."""
        tokens = self.opening(conversation)
        for turn, answer in enumerate(answers):
            tokens += [*self.message(conversation, turn), *answer]
        return tokens + self.message(conversation, len(answers))

    def run(self, server: Server, phase: str, progress: Progress) -> list[TurnRecord]:
        """All turns, one of each conversation in turn, so that each finds its device blocks taken by the others.

        A turn reuses no more than the turns before it computed. A phase over a directory that an earlier phase
        filled would find the blocks of this very turn as well, and its times would not compare.
        """
        records: list[TurnRecord] = []
        answers: list[list[Sequence[int]]] = [[] for _ in range(self.conversations)]
        computed: list[int | None] = [None] * self.conversations
        total = self.turns * self.conversations
        progress(phase, 0, total)
        for turn in range(self.turns):
            for conversation in range(self.conversations):
                prompt = self.prompt(conversation, answers[conversation])
                record = server.answer(
                    conversation, turn, prompt, self.scale.answer_tokens, reusable_tokens=computed[conversation]
                )
                # The last token of an answer was chosen, but not fed to the model.
                computed[conversation] = len(prompt) + self.scale.answer_tokens - 1
                answers[conversation].append(record.output_ids)
                records.append(record)
                progress(phase, len(records), total)
        return records

    def tokens(self, what: str, count: int) -> list[int]:
        """``count`` token ids that no other ``what`` begins with."""
        source = random.Random(f"{self._seed} {what}")
        return [source.randrange(self.scale.model.vocab) for _ in range(count)]
