"""Trains the GPT of the demo for examples/cpp/generate.

    python -m examples.cpp.generate.train [--out FILE]

It learns the first 700 characters of the manual of Python by heart, so that a reader sees at once
whether what it writes is right. FILE (by default build/gpt.pt) is a dict, written by torch.save, of

- weights: the parameters by name;
- heads: the number of attention heads;
- alphabet: the characters, in the order of their tokens;
- prompt: the start of a text;
- text: that start and how Python goes on, up to the model's context: always the character that is
  likeliest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from examples.demo.gpt import GPT, Config, Training
from examples.demo.text import ALPHABET

STEPS = 300
PROMPT = "The simple form"


def train(config: Config) -> GPT:
    training = Training("attn", config)
    training.text = training.text[:700]
    for embedding in (training.model.token, training.model.position):
        nn.init.normal_(embedding.weight, std=0.1)  # learns faster than from torch's 1
    for step in range(1, STEPS + 1):
        loss = training.step()
        if step % 50 == 0:
            print(f"step {step} of {STEPS}: loss {loss:.3f}", flush=True)
    return training.model.eval()


@torch.no_grad()
def complete(model: GPT, prompt: str, context: int) -> str:
    """The prompt and the likeliest characters after it, without a cache."""
    tokens = [ALPHABET.index(character) for character in prompt]
    while len(tokens) < context:
        logits = model(torch.tensor([tokens]))  # of all positions, again and again
        tokens.append(int(logits[0, -1].argmax()))
    return "".join(ALPHABET[token] for token in tokens)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.cpp.generate.train")
    parser.add_argument("--out", type=Path, default=Path("build/gpt.pt"), metavar="FILE")
    out: Path = parser.parse_args().out

    config = Config(context=192, batch=4, layers=2)
    model = train(config)
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "weights": dict(model.state_dict()),  # torch::pickle_load knows no OrderedDict
            "heads": config.heads,
            "alphabet": ALPHABET,
            "prompt": PROMPT,
            "text": complete(model, PROMPT, config.context),
        },
        out,
    )
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
