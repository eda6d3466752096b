"""Check plans against what the rows hold, for an engine in the decode thread of PROCESS 2.

Remembers how many positions of each row are computed, and says what is wrong with a row's plan before a forward that
it would end for all rows. Pure: knows no tensors, no model and no sampling.
"""

from __future__ import annotations

from inference_api.backend.engines.base import EngineInfo, RowError, RowPlan, RowResult, StepPlan


class RowLengths:
    """The number of computed positions of every row."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self.computed = [0] * info.num_rows
        self._written = [0] * info.num_rows

    def split(self, plan: StepPlan) -> tuple[list[RowPlan], dict[int, RowResult]]:
        """Return the rows that can be computed, and an error for each of the others, by row.

        Raises ValueError for a plan that is no plan: rows out of range, out of order or twice.
        """
        numbers = [row.row for row in plan.rows]
        if numbers != sorted(set(numbers)) or (numbers and not 0 <= numbers[0] <= numbers[-1] < self._info.num_rows):
            raise ValueError(f"rows {numbers} of a plan do not ascend within 0 to {self._info.num_rows - 1}")
        beginning = {row.row for row in plan.rows if row.start == 0 or row.prefix is not None}
        sound: list[RowPlan] = []
        faults: dict[int, RowResult] = {}
        for row in plan.rows:
            fault = (
                self._fault_of(row)
                or self._fault_of_prefix(row, beginning)
                or self._fault_of_drafts(row)
                or self._fault_of_pool(row)
                or self._fault_of_score(row)
            )
            if fault is None:
                sound.append(row)
                end = row.start + len(row.token_ids) + len(row.draft_ids)
                self._written[row.row] = max(self._written[row.row], end)
            else:
                faults[row.row] = RowResult(row.row, error=RowError("invalid_plan", fault))
        return sound, faults

    def advance(self, row: RowPlan, num_accepted: int = 0) -> None:
        """Take note that a row's plan has been computed, and that so many of its drafts stay in its KV cache."""
        self.computed[row.row] = row.start + len(row.token_ids) + num_accepted

    def take_written(self, row: int) -> int:
        """Return how many positions a row has been written up to since the last call, by whomever."""
        written, self._written[row] = self._written[row], 0
        return written

    def forget(self, row: int) -> None:
        """Begin a row again at position 0."""
        self.computed[row] = 0

    def _fault_of(self, row: RowPlan) -> str | None:
        end = row.start + len(row.token_ids) + len(row.draft_ids)
        if not row.token_ids:
            return "No tokens to compute."
        if row.start < 0 or end > self._info.context_tokens:
            return (
                f"Positions {row.start} to {end - 1} are not within the context of {self._info.context_tokens} tokens."
            )
        if row.prefix is None and row.start not in (0, self.computed[row.row]):
            return f"Position {row.start} does not follow the {self.computed[row.row]} computed ones."
        for token_id in row.token_ids + row.draft_ids:
            if not 0 <= token_id < self._info.vocab_size:
                return f"Token id {token_id} is not within the vocabulary of {self._info.vocab_size}."
        return None

    def _fault_of_prefix(self, row: RowPlan, beginning: set[int]) -> str | None:
        prefix = row.prefix
        if prefix is None:
            return None
        if not self._info.copies_prefixes:
            return "This engine copies no prefixes."
        if not 0 <= prefix.source_row < self._info.num_rows:
            return f"Row {prefix.source_row} is not within 0 to {self._info.num_rows - 1}."
        if prefix.source_row != row.row and prefix.source_row in beginning:
            return f"Row {prefix.source_row} begins a sequence itself in this step."
        if not 0 < prefix.num_tokens <= self.computed[prefix.source_row]:
            held = self.computed[prefix.source_row]
            return f"Row {prefix.source_row} holds {held} positions, not a prefix of {prefix.num_tokens}."
        if row.start != prefix.num_tokens:
            return f"Position {row.start} does not follow a prefix of {prefix.num_tokens}."
        return None

    def _fault_of_drafts(self, row: RowPlan) -> str | None:
        if row.draft_ids and row.sample is None:
            return "A row that draws nothing has no use for drafts."
        if len(row.draft_ids) > self._info.max_draft_tokens:
            return f"{len(row.draft_ids)} drafts are more than this engine's {self._info.max_draft_tokens}."
        return None

    def _fault_of_pool(self, row: RowPlan) -> str | None:
        if row.pool is None:
            return None
        if not self._info.embedding_size:
            return "This engine makes no embeddings."
        if row.sample is not None or row.score is not None or row.prefix is not None:
            return "A row that is pooled computes every id itself, and draws and scores none."
        return None

    def _fault_of_score(self, row: RowPlan) -> str | None:
        if row.score is None:
            return None
        if row.prefix is not None or row.draft_ids:
            return "A row that is scored computes every id itself, and guesses none."
        next_ids = row.score.next_ids
        if not 0 < len(next_ids) <= len(row.token_ids):
            return f"{len(next_ids)} ids to score do not follow {len(row.token_ids)} computed ones."
        wrong = next((token_id for token_id in next_ids if not 0 <= token_id < self._info.vocab_size), None)
        return None if wrong is None else f"Token id {wrong} is not within the vocabulary of {self._info.vocab_size}."
