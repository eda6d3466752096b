"""The surface of Hugging Face's text-generation-inference: `/generate`, `/generate_stream` and `POST /`."""
