"""The run of peers that have transformers' `generate`."""

from typing import Any

import numpy as np
import torch
import transformers
from protocol import Clock, Run


class _Ticks(transformers.StoppingCriteria):
    """Never stops; hands each new id to the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self._clock.tick(input_ids[0, -1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate_run(model: Any) -> Run:
    """Return the run of a model: greedy, without an end at EOS."""

    @torch.inference_mode()
    def run(ids: np.ndarray, gen: int) -> Clock:
        prompt = torch.from_numpy(ids)
        clock = Clock()
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=gen + 1,
            min_new_tokens=gen + 1,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([_Ticks(clock)]),
        )
        return clock

    return run
