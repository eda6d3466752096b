"""Make embeddings with transformers' own model: `… IMAGE THREADS`, requests on stdin, times and vectors on stdout.

The baseline of the `api` bench: a process with the model in fp32 and nothing around it, mean pooling, vectors of length
one. A line in is a list of requests, each a list of texts that are one batch; a line out is each request's seconds and
vectors. The first line says that it is ready.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from benches.real_model import load_tokenizer
from inference_api.server.tokenizer import Tokenizer


def embed(model: Any, tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return the texts' vectors, computed as one batch; no text is longer than the model's context."""
    ids = [torch.tensor(tokenizer.encode(text)) for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # (texts, longest)
    lengths = torch.tensor([len(of) for of in ids])
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()  # (texts, longest)
    states = model(input_ids=padded, attention_mask=mask).last_hidden_state  # (texts, longest, hidden)
    means = (states * mask[..., None]).sum(1) / lengths[:, None]
    return torch.nn.functional.normalize(means)  # (texts, hidden)


def main() -> int:
    """Load the model, say so, then answer each line of stdin until it ends."""
    image = Path(sys.argv[1])
    torch.set_num_threads(int(sys.argv[2]))
    tokenizer = load_tokenizer(image)
    model = AutoModel.from_pretrained(image, dtype=torch.float32).eval()
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        answers = []
        for texts in json.loads(line):
            began = time.monotonic()
            with torch.inference_mode():
                vectors = embed(model, tokenizer, texts)
            answers.append((time.monotonic() - began, vectors.tolist()))
        print(json.dumps(answers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
