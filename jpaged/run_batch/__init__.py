"""Batch files of requests, answered by an ASGI app in this process, so that a run that was killed can go on."""
