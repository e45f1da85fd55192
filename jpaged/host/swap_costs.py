"""Owns `SwapCosts`: whether pages are brought back from swap space, or their tokens computed again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SwapCosts:
    """Seconds, as the engine measures them; None until it has. Until all are known, pages are brought back.

    always: bring them back whatever it costs.
    """

    page_size: int
    always: bool = False
    seconds_per_move: float | None = None  # from swap space to the pool, however many pages
    seconds_per_page: float | None = None  # and for each of them
    seconds_per_token: float | None = None  # of a prompt, in the best step so far

    def pays(self, num_pages: int) -> bool:
        """Whether so many pages are cheaper to bring back than to compute."""
        if self.always or self.seconds_per_move is None or self.seconds_per_page is None:
            return True
        if self.seconds_per_token is None:
            return True
        computing = num_pages * self.page_size * self.seconds_per_token
        return self.seconds_per_move + num_pages * self.seconds_per_page <= computing

    @property
    def ever_pays(self) -> bool:
        """Whether it does for sequences that are long enough."""
        return self.pays(2**20)

    def record_prompt(self, seconds: float, num_tokens: int) -> None:
        """A step has computed so many tokens."""
        measured = seconds / num_tokens
        known = self.seconds_per_token
        self.seconds_per_token = measured if known is None else min(known, measured)
