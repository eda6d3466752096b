"""PROCESS 2: the decode backend. Never imports flask; only `engines` imports torch."""
