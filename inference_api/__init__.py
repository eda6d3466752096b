"""A streaming inference API for one language model and several tenants.

PROCESS 1 is `server` (Flask under gunicorn), PROCESS 2 is `backend` (the decode loop and its engine); `messages` and
`queues` are the only road between them. The reverse proxy, PROCESS 3, is the package `proxy` beside this one.
"""

__version__ = "0.1.0"
