"""The demo models and what they are asked."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = {
    "smollm2": ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": ROOT / "models/gemma-3-270m-q4_k_m.gguf",
}
PROMPTS = (
    "A",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Der schnelle braune Fuchs springt über den faulen Hund und",
    "В одном далёком городе жил старый мастер, который",
    "海の向こうに小さな島があり、そこには",
    "كان يا ما كان في قديم الزمان",
    "🙂🎉 emoji and numbers: 3.14159, 2.71828,",
    "List three fruits:\n1. apple\n2.",
    "The committee met on Tuesday to discuss the harbour. " * 12 + "After the vote,",
)
