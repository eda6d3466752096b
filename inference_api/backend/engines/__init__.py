"""Engines: the only folder that imports torch. Each is imported by name, on demand, by backend/main.py."""
