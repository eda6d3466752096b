"""Programs that are clients of a service: one a library, run by the interpreter of that library's own environment.

A program knows where the service is, its JWT and its model's name from BASE_URL, TOKEN and MODEL, and nothing else of
it; it prints a JSON line for each of its checks. `checks.py` and `checks.mjs` are all that they share.
"""
