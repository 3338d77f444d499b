"""Write a GGUF file's model as a Hugging Face folder in float32. Usage: GGUF FOLDER."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

source, target = Path(sys.argv[1]), sys.argv[2]
model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
# The weights are plain now; what remembers the quantisation would make saving refuse.
model.is_quantized = False
for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
    if hasattr(owner, name):
        delattr(owner, name)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
