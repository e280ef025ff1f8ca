"""A quantised GGUF becomes a Hugging Face folder in bf16; run as a program of its own, for it imports torch."""

import sys
from pathlib import Path


def convert(gguf: Path, target: Path) -> None:
    """Write config, tokenizer and dequantised bf16 safetensors of ``gguf`` into ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # What is saved is no longer quantised; left in, these would make loading it look for a GGUF.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
