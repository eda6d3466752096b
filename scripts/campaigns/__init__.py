"""Check the whole service as strangers use it: what takes too long for scripts/test; scripts/campaign runs it.

A part is a module with `run(context)`; `table.py` lists all of them with their counts by tier, `part.py` says what a
part is given. Each starts the services it needs. Knows the service by its HTTP alone.
"""
