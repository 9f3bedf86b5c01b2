"""Which token comes next: greedy, nucleus sampling with seeds, several outputs of one prompt, and beam search.

A `Generation` holds the outputs of one request. It is given logits and says by which tokens the sequences grow, which
fork, and which end; whoever owns the blocks follows. Nucleus (top-p) sampling is of "The Curious Case of Neural Text
Degeneration" (Holtzman et al., ICLR 2020). Beam search scores and stops as transformers' `generate` does, so that the
same model gives the same tokens; see `_beam_search` in transformers/generation/utils.py for the rules.

Chance depends on the request's seed, the output's number and the position only. Neither the batch, nor a preemption,
nor the engine that computes a token changes an output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

TEMPERATURE_MIN = 1e-5  # logits that are divided by less become infinite, and then nothing can be chosen
LENGTH_PENALTY_MAX = 32.0  # of a power of any length that a model has, which must stay a number
IMPOSSIBLE = -1.0e9  # a score below every sum of log probabilities; transformers' value, as sums are made with it


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens chosen. Raises ValueError for settings that make no sense together."""

    max_tokens: int = 16  # of each output; an end-of-sequence token ends it earlier
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # sample among the likeliest tokens that have this probability together
    seed: int = 0
    n: int = 1  # outputs
    beams: int = 1  # more than 1: beam search, whose `n` best outputs count
    length_penalty: float = 1.0  # beam search: an output's score is divided by its length to this power
    # Beam search: True ends with the first `beams` outputs, False once a better one is unlikely, "never" only when none
    # can be better.
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if any(not isinstance(count, int) or count < 1 for count in (self.max_tokens, self.n, self.beams)):
            raise ValueError("max_tokens, n and beams are whole numbers of at least 1")
        if not (self.temperature == 0 or TEMPERATURE_MIN <= self.temperature < math.inf) or not 0 < self.top_p <= 1:
            raise ValueError(f"temperature is 0 or at least {TEMPERATURE_MIN:g}, and top_p above 0 and at most 1")
        if not abs(self.length_penalty) <= LENGTH_PENALTY_MAX:
            raise ValueError(f"length_penalty is at most {LENGTH_PENALTY_MAX:g}, or as much below 0")
        if self.beams > 1 and (self.temperature or self.top_p < 1):
            raise ValueError("beam search follows the likeliest tokens: leave temperature and top_p away")
        if self.beams > 1 and self.n > self.beams:
            raise ValueError(f"{self.beams} beams have {self.beams} outputs, not {self.n}")
        if self.beams == 1 and self.n > 1 and not self.temperature:
            raise ValueError(f"{self.n} outputs would be equal: set a temperature above 0, or beams")


@dataclass(frozen=True, slots=True)
class Growth:
    """One sequence of a request after a step: what it grew from, and by which token."""

    parent: int  # place of the sequence that it grew from, among those of the step
    token: int
    ends: bool = False  # the token is its last one


class Generation:
    """The outputs of one request, from its prompt on.

    At first the request has one sequence, its prompt. From then on it has those that `choose` returned last and that
    did not end, in that order. Two that grew from one sequence share its blocks: the second is a fork.
    """

    def __init__(self, sampling: Sampling, eos: frozenset[int] = frozenset()) -> None:
        """`eos`: tokens that end an output, which contains them."""
        self.sampling = sampling
        self._eos = eos
        self._search = _BeamSearch(sampling, eos) if sampling.beams > 1 else None
        self._outputs: list[list[int]] = [[] for _ in range(sampling.n)]
        self._growing: list[int] | None = None  # the output of each sequence; None: the prompt, which is all of them

    @property
    def outputs(self) -> list[list[int]]:
        """Tokens beyond the prompt of each of the `n` outputs; of beam search the best that have ended, best first."""
        found = self._search.ended if self._search else self._outputs
        return [list(tokens) for tokens in found[: self.sampling.n]]

    def choose(self, logits: torch.Tensor) -> list[Growth]:
        """Choose the next tokens of all sequences at once: outputs begin as one, and beams compete. Waits for a GPU.

        A sequence that no result grew from is computed no further. Without any result the request is done.

        Args:
            logits: `(sequence, vocabulary)`, one row for each sequence that the request has now.
        """
        rows = logits.to("cpu", torch.float32)
        return self._search.step(rows) if self._search else self._sample(rows)

    def _sample(self, rows: torch.Tensor) -> list[Growth]:
        if self._growing is None:
            origins = [(0, output) for output in range(self.sampling.n)]
        else:
            origins = list(enumerate(self._growing))
        assert len(rows) == max(row for row, _ in origins) + 1, "the sequences of a request are computed together"
        grown, self._growing = [], []
        for row, output in origins:
            tokens = self._outputs[output]
            tokens.append(self.pick(rows[row], output, len(tokens)))
            ends = tokens[-1] in self._eos or len(tokens) == self.sampling.max_tokens
            grown.append(Growth(row, tokens[-1], ends))
            if not ends:
                self._growing.append(output)
        return grown

    def pick(self, row: torch.Tensor, output: int, position: int) -> int:
        """The token of this output at this position, without beams. Changes nothing.

        Args:
            row: logits, `(vocabulary,)` float32 in host memory.
        """
        if not self.sampling.temperature:
            return int(row.argmax())
        scores = TemperatureLogitsWarper(float(self.sampling.temperature))(None, row[None])
        scores = TopPLogitsWarper(self.sampling.top_p)(None, scores)
        # The hash of a tuple of integers is the same in every process.
        chance = torch.Generator().manual_seed(hash((self.sampling.seed, output, position)))
        return int(torch.multinomial(scores[0].softmax(dim=-1), 1, generator=chance))


class _BeamSearch:
    """Scores of the running beams, and the best outputs that have ended."""

    def __init__(self, sampling: Sampling, eos: frozenset[int]) -> None:
        self._sampling = sampling
        self._eos = torch.tensor(sorted(eos), dtype=torch.int64)
        self._beams: list[list[int]] = [[] for _ in range(sampling.beams)]  # tokens beyond the prompt
        self._scores = torch.full((sampling.beams,), IMPOSSIBLE)  # sums of log probabilities, by beam
        self._scores[0] = 0.0  # all beams begin equal, so only one of them may have children
        self.ended: list[list[int]] = [[] for _ in range(sampling.beams)]  # best first
        self._ended_scores = torch.full((sampling.beams,), IMPOSSIBLE)
        self._has_ended = torch.zeros(sampling.beams, dtype=torch.bool)  # whether the entry is an output
        self._can_improve = True

    def step(self, logits: torch.Tensor) -> list[Growth]:
        """The beams that go on. None when the search is over.

        Args:
            logits: `(beam, vocabulary)`, or `(1, vocabulary)` while all beams are the prompt.
        """
        wanted = self._sampling
        assert len(logits) in (1, wanted.beams), "the beams of a request are computed together"
        totals = logits.log_softmax(dim=-1) + self._scores[:, None]
        # As many as are left for every beam even if all the likeliest ones end here.
        scores, places = totals.flatten().topk(max(2, 1 + len(self._eos)) * wanted.beams)
        parents, tokens = places // logits.shape[-1], places % logits.shape[-1]
        candidates = [
            [*self._beams[beam], token] for beam, token in zip(parents.tolist(), tokens.tolist(), strict=True)
        ]
        length = len(candidates[0])
        ends = torch.isin(tokens, self._eos) | (length == wanted.max_tokens)

        self._keep_best(scores / length**wanted.length_penalty, ends, candidates)
        running = scores + ends * IMPOSSIBLE
        kept = running.topk(wanted.beams).indices
        self._scores, self._beams = running[kept], [candidates[place] for place in kept.tolist()]
        self._can_improve = self._can_improve and self._may_improve(length)
        is_full = wanted.early_stopping is True and bool(self._has_ended.all())
        if not self._can_improve or is_full or bool(ends.all()):
            return []
        origins = parents if len(logits) > 1 else torch.zeros_like(parents)
        return [Growth(int(origins[place]), int(tokens[place])) for place in kept]

    def _keep_best(self, scores: torch.Tensor, ends: torch.Tensor, candidates: list[list[int]]) -> None:
        """Only the first `beams` candidates may become outputs; the others are there to go on."""
        ends = ends & (torch.arange(len(ends)) < self._sampling.beams)
        merged = torch.cat((self._ended_scores, scores + ~ends * IMPOSSIBLE))
        self._ended_scores, best = merged.topk(self._sampling.beams)
        self._has_ended = torch.cat((self._has_ended, ends))[best]
        self.ended = [(self.ended + candidates)[place] for place in best.tolist()]

    def _may_improve(self, length: int) -> bool:
        """Whether a running beam could still end better than the worst output."""
        wanted = self._sampling
        longest = wanted.early_stopping == "never" and wanted.length_penalty > 0
        hoped = self._scores[0] / (wanted.max_tokens if longest else length) ** wanted.length_penalty
        return bool((hoped > torch.where(self._has_ended, self._ended_scores.min(), IMPOSSIBLE)).any())
