"""Hold the benches behind scripts/bench: each starts the real service and measures it from client sockets.

Runs by hand, as a client of the service on the same machine, so that its own processor time is part of what the machine
does. `service` starts and observes processes, `streams` is the client, `figures` makes numbers of samples; `frontend`,
`batching` and `over_http` are the benches. `engines` alone has no service: it compares engines in its own process.
Nothing here is imported by the service.
"""
