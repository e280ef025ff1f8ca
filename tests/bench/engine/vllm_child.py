"""vLLM behind a pipe: run by the Python of its own venv, asked in JSON lines on stdin, answering on stdout.

The first line to come is ``{"model", "dtype", "eager", "adapters", "rows"}``; the answer says which vLLM it is. Then:
``{"decode": [adapter or null per row], "prompt", "lengths": [short, long]}`` → ``{"s": seconds of a decode step}``, by
the difference of two output lengths, and ``{"prefill": adapter or null, "tokens"}`` → ``{"s": seconds of one prompt}``.
Prompts never repeat, so that no prefix cache helps. What vLLM itself prints goes to stderr.
"""

import itertools
import json
import os
import sys
import time
from typing import Any, TextIO

VOCAB, FIRST = 49152, 100
"""Token ids of prompts."""


def serve(asked: TextIO, answers: TextIO) -> None:
    """Answer until stdin ends."""
    import torch
    import vllm
    from vllm.config import CompilationMode
    from vllm.lora.request import LoRARequest

    begin = json.loads(asked.readline())
    lora: dict[str, Any] = {}
    if begin["adapters"]:
        lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": len(begin["adapters"])}
    llm = vllm.LLM(
        begin["model"],
        dtype=begin["dtype"],
        enforce_eager=begin["eager"],
        max_model_len=1024,
        max_num_seqs=begin["rows"],
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        seed=0,
        **lora,
    )
    adapters = {
        name: LoRARequest(name, number, path) for number, (name, path) in enumerate(begin["adapters"].items(), 1)
    }
    fresh = itertools.count()

    def prompt(tokens: int) -> dict[str, list[int]]:
        seed = next(fresh)
        return {"prompt_token_ids": [FIRST + (seed * 7919 + i * 31) % (VOCAB - FIRST) for i in range(tokens)]}

    def generate(rows: list[str | None], tokens: int, new: int) -> float:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        wanted = None if not adapters else [None if name is None else adapters[name] for name in rows]
        prompts = [prompt(tokens) for _ in rows]
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=wanted, use_tqdm=False)
        seconds = time.perf_counter() - begun
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return seconds

    def decode(rows: list[str | None], tokens: int, lengths: list[int]) -> float:
        short, long = lengths
        return (generate(rows, tokens, long) - generate(rows, tokens, short)) / (long - short)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    compiles = llm.llm_engine.vllm_config.compilation_config.mode != CompilationMode.NONE
    tell({"vllm": vllm.__version__, "torch": torch.__version__, "compiles": bool(compiles)})
    for line in asked:
        ask = json.loads(line)
        if "prefill" in ask:
            tell({"s": generate([ask["prefill"]], ask["tokens"], 1)})
        else:
            tell({"s": decode(ask["decode"], ask["prompt"], ask["lengths"])})


def main() -> None:
    """Keep the real stdout for answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        serve(sys.stdin, answers)
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        raise


if __name__ == "__main__":
    main()
