"""PROCESS 1: Flask under gunicorn, one thread a stream. Never imports torch, transformers or the backend."""
