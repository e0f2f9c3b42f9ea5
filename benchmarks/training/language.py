"""A made-up language whose entropy is known, so that a loss can be compared with the least possible.

A text is about one topic, which its first token names. In each topic a token has four successors, at random among the
vocabulary, which follow it with the probabilities of :data:`CHANCES`. A model has to learn ``topics x vocabulary``
successions, and cannot predict a token with less than 1.75 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHANCES = (0.5, 0.25, 0.125, 0.125)  # of a token's successors, in the order they were drawn
FLOOR = -sum(chance * math.log(chance) for chance in CHANCES)  # least cross entropy of a token in nats


@dataclass(frozen=True)
class Language:
    """A vocabulary and topics; ``seed`` determines which token follows which."""

    vocabulary: int
    topics: int
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that a model has to know: the vocabulary and a name for each topic."""
        return self.vocabulary + self.topics

    def successors(self, device: torch.device) -> Tensor:
        """Return the successors of each token in each topic, all different: (topics, vocabulary, 4)."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.rand(self.topics, self.vocabulary, self.vocabulary, generator=generator)
        return drawn.topk(len(CHANCES)).indices.to(device)

    def texts(self, count: int, length: int, seed: int, device: torch.device) -> Tensor:
        """Return names of topics, each with a text about it: (count, length + 1), int64."""
        generator = torch.Generator().manual_seed(seed)
        topics = torch.randint(self.topics, (count,), generator=generator)
        token = torch.randint(self.vocabulary, (count,), generator=generator)
        draws = torch.multinomial(torch.tensor(CHANCES), count * (length - 1), replacement=True, generator=generator)
        successors, topics, token = self.successors(device), topics.to(device), token.to(device)
        text = [topics + self.vocabulary, token]
        for draw in draws.to(device).view(length - 1, count):
            token = successors[topics, token, draw]
            text.append(token)
        return torch.stack(text, dim=1)
