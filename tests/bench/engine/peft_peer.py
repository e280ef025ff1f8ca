"""transformers + PEFT with one adapter: the eager loop that people write."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import peft
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from serving.replica.packing import TokenRow
from tests.bench.engine.figures import Inputs
from tests.bench.engine.options import PROMPT

LR = 1e-3


class PeftPeer:
    """A model with an adapter from a folder."""

    def __init__(self, folder: Path, dtype: torch.dtype, adapter: Path) -> None:
        self.dtype = dtype
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)

    @torch.no_grad()
    def decode(self, rows: int, steps: int) -> float:
        """Return the seconds of a decode step after prompts of ``PROMPT`` tokens, in the mean over ``steps``."""
        cache = DynamicCache()
        ids = torch.arange(100, 100 + PROMPT).repeat(rows, 1)
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        begun = time.perf_counter()
        for _ in range(steps):
            out = self.model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
            out.logits[:, -1].argmax(-1)
        return (time.perf_counter() - begun) / steps

    @torch.no_grad()
    def prefill(self, tokens: int) -> float:
        """Return the seconds of one prompt."""
        begun = time.perf_counter()
        self.model(input_ids=torch.arange(100, 100 + tokens)[None], use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begun

    def train(self, steps: Sequence[Sequence[TokenRow]]) -> Iterator[float]:
        """Yield the seconds of each step: its rows padded to the longest, loss on completions, AdamW, clipping."""
        trained = [p for name, p in self.model.named_parameters() if "lora_" in name]
        optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
        for rows in steps:
            begun = time.perf_counter()
            longest = max(len(row.ids) for row in rows)
            ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
            labels = torch.full((len(rows), longest), -100)
            for i, row in enumerate(rows):
                ids[i, : len(row.ids)] = torch.tensor(row.ids)
                mask[i, : len(row.ids)] = 1
                labels[i, row.prompt : len(row.ids)] = ids[i, row.prompt : len(row.ids)]
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield time.perf_counter() - begun

    def flags(self) -> Inputs:
        """Return how it runs."""
        return {
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "torch": torch.__version__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
            "training": "4 rows padded to the longest, AdamW, clipping at 1",
        }
