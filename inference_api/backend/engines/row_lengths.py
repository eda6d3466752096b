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

    def split(self, plan: StepPlan) -> tuple[list[RowPlan], dict[int, RowResult]]:
        """Return the rows that can be computed, and an error for each of the others, by row.

        Raises ValueError for a plan that is no plan: rows out of range, out of order or twice.
        """
        numbers = [row.row for row in plan.rows]
        if numbers != sorted(set(numbers)) or (numbers and not 0 <= numbers[0] <= numbers[-1] < self._info.num_rows):
            raise ValueError(f"rows {numbers} of a plan do not ascend within 0 to {self._info.num_rows - 1}")
        sound: list[RowPlan] = []
        faults: dict[int, RowResult] = {}
        for row in plan.rows:
            fault = self._fault_of(row)
            if fault is None:
                sound.append(row)
            else:
                faults[row.row] = RowResult(row.row, error=RowError("invalid_plan", fault))
        return sound, faults

    def advance(self, row: RowPlan) -> None:
        """Take note that a row's plan has been computed."""
        self.computed[row.row] = row.start + len(row.token_ids)

    def forget(self, row: int) -> None:
        """Begin a row again at position 0."""
        self.computed[row] = 0

    def _fault_of(self, row: RowPlan) -> str | None:
        end = row.start + len(row.token_ids)
        if not row.token_ids:
            return "No tokens to compute."
        if row.start < 0 or end > self._info.context_tokens:
            return (
                f"Positions {row.start} to {end - 1} are not within the context of {self._info.context_tokens} tokens."
            )
        if row.start not in (0, self.computed[row.row]):
            return f"Position {row.start} does not follow the {self.computed[row.row]} computed ones."
        for token_id in row.token_ids:
            if not 0 <= token_id < self._info.vocab_size:
                return f"Token id {token_id} is not within the vocabulary of {self._info.vocab_size}."
        return None
