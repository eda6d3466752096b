"""Hold the benches behind scripts/bench: each starts the real service and measures it from client sockets.

Runs by hand, as a client of the service on the same machine, so that its own processor time is part of what the machine
does. `service` starts and observes processes, `streams` is the client, `figures` makes numbers of samples; `frontend`,
`batching`, `over_http` and `peers` are the benches. The others have no service: they load engines in processes of their
own. Nothing here is imported by the service.
"""
