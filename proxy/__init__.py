"""Own PROCESS 3: the reverse proxy that knows who calls before the inference server is touched.

The pure core (auth, jws, keys, routes, admission, headers, pace) takes bytes and answers with a decision; limits,
forward, connection, worker and app do the input and output around it. Nothing here knows models, prompts or
`inference_api`.
"""
