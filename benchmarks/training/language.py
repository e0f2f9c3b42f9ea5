"""A made-up language whose entropy is known, so that a loss can be judged by how far it is from the least possible.

A text is about one topic, which its first token names. In each topic a token has four successors, at random among the
vocabulary, which follow it with the probabilities of :data:`CHANCES`. A model has to learn ``topics x vocabulary``
successions, and nothing tells it less than 1.75 bits about a token from which it cannot learn more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHANCES = (0.5, 0.25, 0.125, 0.125)
"""Of a token's successors, in the order they were drawn."""

FLOOR = -sum(chance * math.log(chance) for chance in CHANCES)
"""The least cross entropy of a token, in nats: 1.75 bits. The first token of a text, which is any, is not asked for."""


@dataclass(frozen=True)
class Language:
    """So many tokens and topics; ``seed`` says which follows which."""

    vocabulary: int
    topics: int
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens that a model has to know: the vocabulary and a name for each topic."""
        return self.vocabulary + self.topics

    def successors(self, device: torch.device) -> Tensor:
        """(topics, vocabulary, 4): what may follow a token, all different."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.rand(self.topics, self.vocabulary, self.vocabulary, generator=generator)
        return drawn.topk(len(CHANCES)).indices.to(device)

    def texts(self, count: int, length: int, seed: int, device: torch.device) -> Tensor:
        """(count, length + 1), int64: the name of a topic, and a text about it."""
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
